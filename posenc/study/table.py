"""A table, for the terminal, for Markdown and for HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from posenc.study.columns import align


@dataclass(frozen=True)
class Table:
    """A caption, a header and rows of text.

    ``minor`` rows belong to the row above them; ``best`` cells, row and column, are bold; ``wrong``
    ones are red.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    minor: frozenset[int] = frozenset()
    best: frozenset[tuple[int, int]] = frozenset()
    wrong: frozenset[tuple[int, int]] = frozenset()

    def text(self, width: int | None = None) -> str:
        """Aligned columns under the caption, in lines of at most ``width`` where possible."""
        return f"{wrap(self.caption, width)}\n\n{align([self.columns, *self.rows], width)}"

    def markdown(self) -> str:
        """A pipe table under the caption."""
        rule = [":--", *["--:"] * (len(self.columns) - 1)]
        lines = [
            map(escape_markdown, self.columns),
            rule,
            *([self._marked(r, c) for c in range(len(row))] for r, row in enumerate(self.rows)),
        ]
        return "\n".join(
            [f"{escape_markdown(self.caption)}", "", *(f"| {' | '.join(ln)} |" for ln in lines)]
        )

    def html(self) -> str:
        """A ``<table>`` with all text escaped."""
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        marks = [
            [
                (place in self.best, place in self.wrong)
                for place in ((r, c) for c in range(len(row)))
            ]
            for r, row in enumerate(self.rows)
        ]
        body = "".join(
            _html_row(row, index in self.minor, marks[index]) for index, row in enumerate(self.rows)
        )
        return (
            f'<div class="scroll"><table><caption>{html.escape(self.caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _marked(self, row: int, column: int) -> str:
        text = escape_markdown(self.rows[row][column])
        return f"**{text}**" if (row, column) in self.best | self.wrong else text


def wrap(text: str, width: int | None) -> str:
    """The text in lines of ``width``; longer words, such as paths, stay whole."""
    if width is None:
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def escape_markdown(cell: str) -> str:
    """Text that neither ends its column nor becomes HTML."""
    return html.escape(cell, quote=False).replace("|", r"\|").replace("\n", " ")


def _html_row(row: Sequence[str], minor: bool, marks: Sequence[tuple[bool, bool]]) -> str:
    cells = []
    for cell, (is_best, is_wrong) in zip(row[1:], marks[1:], strict=True):
        shown = html.escape(cell)
        named = cell if cell in {"better", "worse", "tie", "rises", "falls"} else ""
        named = "wrong" if is_wrong else named
        css_class = f' class="{named}"' if named else ""
        shown = shown.replace("-", "−", 1) if cell[:1] == "-" else shown
        cells.append(f"<td{css_class}>{f'<b>{shown}</b>' if is_best else shown}</td>")
    kind = ' class="minor"' if minor else ""
    return f'<tr{kind}><th scope="row">{html.escape(row[0])}</th>{"".join(cells)}</tr>'
