"""Columns of text that fit a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

Lines = Sequence[Sequence[str]]
_GAP = "  "


def aligned(lines: Lines, width: int | None = None) -> str:
    """The first line as a head over a rule; names to the left, numbers to the right.

    Lines wider than ``width`` lose the spaces around ``±``. What is still too wide becomes several
    blocks of columns, each with the names again; a long name goes on below.
    """
    if width is None or _wide(lines) <= width:
        return _block(lines)
    tight = [[cell.replace(" ± ", "±") for cell in line] for line in lines]
    if _wide(tight) <= width:
        return _block(tight)
    longer = [below for line in tight for below in _wrapped(line, max(20, width // 3))]
    return "\n\n".join(_block(part) for part in _parts(longer, width))


def shortened(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def _widths(lines: Lines) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _wide(lines: Lines) -> int:
    widths = _widths(lines)
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _block(lines: Lines) -> str:
    first, *rest = _widths(lines)
    shown = [
        _GAP.join([line[0].ljust(first), *map(str.rjust, line[1:], rest)]).rstrip()
        for line in lines
    ]
    return "\n".join([shown[0], "-" * max(map(len, shown)), *shown[1:]])


def _wrapped(line: Sequence[str], room: int) -> Iterator[Sequence[str]]:
    # Textwrap breaks at spaces, a label also after its signs.
    spaced = re.sub(r"([,+])(?=\S)", r"\1\0 ", line[0])
    below = textwrap.wrap(spaced, room, subsequent_indent=_GAP, break_on_hyphens=False)
    names = [name.replace("\0 ", "").replace("\0", "") for name in below] or [""]
    yield [names[0], *line[1:]]
    yield from ([name, *[""] * len(line[1:])] for name in names[1:])


def _parts(lines: Lines, width: int) -> Iterator[Lines]:
    """Equal numbers of columns beside the names: as many as fit, and one at least."""
    columns = len(lines[0]) - 1

    def cut(size: int) -> list[Lines]:
        starts = range(1, columns + 1, size)
        return [[[line[0], *line[n : n + size]] for line in lines] for n in starts]

    fitting = [n for n in range(1, columns + 1) if max(map(_wide, cut(n))) <= width]
    blocks = len(cut(max(fitting, default=1)))
    yield from cut(-(-columns // blocks))
