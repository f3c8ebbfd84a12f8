"""Columns of text, aligned and fitted to a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

Lines = Sequence[Sequence[str]]
_GAP = "  "


def align(lines: Lines, width: int | None = None) -> str:
    """Lines as columns: the first line is a header over a rule; names left, numbers right.

    Lines wider than ``width`` lose the spaces around ``±``. A table that is still too wide becomes
    several blocks of columns. Each block repeats the names, and long names wrap onto more lines.
    """
    if width is None or _total_width(lines) <= width:
        return _block(lines)
    tight = [[cell.replace(" ± ", "±") for cell in line] for line in lines]
    if _total_width(tight) <= width:
        return _block(tight)
    wrapped = [row for line in tight for row in _wrap_name(line, max(20, width // 3))]
    return "\n\n".join(_block(part) for part in _column_blocks(wrapped, width))


def shorten(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def _widths(lines: Lines) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _total_width(lines: Lines) -> int:
    widths = _widths(lines)
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _block(lines: Lines) -> str:
    first, *rest = _widths(lines)
    shown = [
        _GAP.join([line[0].ljust(first), *map(str.rjust, line[1:], rest)]).rstrip()
        for line in lines
    ]
    return "\n".join([shown[0], "-" * max(map(len, shown)), *shown[1:]])


def _wrap_name(line: Sequence[str], room: int) -> Iterator[Sequence[str]]:
    """The line with its name wrapped: further lines hold the rest of the name."""
    # textwrap breaks at spaces; a label may also break after "," and "+".
    spaced = re.sub(r"([,+])(?=\S)", r"\1\0 ", line[0])
    pieces = textwrap.wrap(spaced, room, subsequent_indent=_GAP, break_on_hyphens=False)
    names = [name.replace("\0 ", "").replace("\0", "") for name in pieces] or [""]
    yield [names[0], *line[1:]]
    yield from ([name, *[""] * len(line[1:])] for name in names[1:])


def _column_blocks(lines: Lines, width: int) -> Iterator[Lines]:
    """Blocks of the names and an equal number of columns: as many as fit, at least one."""
    columns = len(lines[0]) - 1

    def cut(size: int) -> list[Lines]:
        starts = range(1, columns + 1, size)
        return [[[line[0], *line[n : n + size]] for line in lines] for n in starts]

    fitting = [n for n in range(1, columns + 1) if max(map(_total_width, cut(n))) <= width]
    blocks = len(cut(max(fitting, default=1)))
    yield from cut(-(-columns // blocks))
