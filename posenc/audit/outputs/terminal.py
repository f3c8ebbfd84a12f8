"""Plain text for a terminal of 80 columns or more, in colour if it has some."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from typing import IO

from posenc.audit.expected import Judged
from posenc.audit.outputs.run import (
    EXPECTED,
    Run,
    absent,
    conditions,
    counted,
    failures,
    groups,
    in_words,
    measured,
    number,
    one_line,
    ran_groups,
    title,
    verdict,
)
from posenc.audit.record import Record

_COLOURS = {"differs": "31", "not called": "35", "agrees": "32", EXPECTED: "33"}
_SHOWN = 3  # differences of one subject in full; of others the name and the error


def colours(stream: IO[str]) -> bool:
    """Whether a stream takes colour: it is a terminal, and ``NO_COLOR`` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write(
    records: Sequence[Record],
    judged: Judged,
    run: Run,
    *,
    width: int = 80,
    colour: bool = False,
) -> str:
    """A line for each subject; each difference with its place, error and reproducer; the verdict.

    Names and reproducers stay on one line, to be copied.
    """
    lines = list(_subjects(records, judged, width, colour))
    for group in groups(failures(records, judged)):
        for record in group.records[:_SHOWN]:
            lines += ["", *_difference(record, width, colour)]
        lines += _rest(group.records[_SHOWN:], width)
    lines += [""] if judged.errors or judged.notes else []
    for text in judged.errors:
        lines += _wrap("error: ", text, width)
    for text in judged.notes:
        lines += _wrap("note: ", text, width)
    counts = in_words(counted(records, judged))
    status = judged.exit_status(records)
    mark = {0: "agrees", 1: "differs"}.get(status, "not called")
    end = f"{verdict(records, judged)} {counts[:1].upper()}{counts[1:]}."
    lines += ["", *(_paint(line, mark, colour) for line in textwrap.wrap(end, width))]
    return "\n".join(lines) + "\n"


def _subjects(records: Sequence[Record], judged: Judged, width: int, colour: bool) -> Iterator[str]:
    """One line per subject: its name, and how many checks have each status.

    What is not installed is named in one line.
    """
    rows = [(group.title, counted(group.records, judged)) for group in ran_groups(records)]
    room = max(20, width - 2 - max((len(in_words(c)) for _, c in rows), default=0))
    longest = min(room, max((len(name) for name, _ in rows), default=0))
    for name, counts in rows:
        words = in_words(counts)
        start = f"{name:<{longest}}"
        painted = _paint(words, next(iter(counts)), colour)
        if len(start) + 2 + len(words) <= width:
            yield f"{start}  {painted}"
        else:
            yield name
            yield f"  {painted}"
    yield from _wrap("", absent(records), width)


def _difference(record: Record, width: int, colour: bool) -> list[str]:
    lines = _wrap("", f"{record.status}: {title(record)}", width)
    lines = [_paint(line, record.status, colour) for line in lines]
    lines += _wrap("  ", conditions(record), width)
    lines += _wrap("  ", one_line(record.message), width)
    lines += _wrap("  ", measured(record), width)
    if record.reproducer:
        lines.append(f"  {one_line(record.reproducer)}")
    return [*lines, f"  name: {one_line(record.name)}"]


def _rest(records: Sequence[Record], width: int) -> list[str]:
    """Further differences of a subject: their names and errors."""
    if not records:
        return []
    lines = ["", *_wrap("", f"{len(records)} more of {title(records[0])}:", width)]
    for record in records:
        error = f"  error {number(record.error)}" if record.error is not None else ""
        lines.append(f"  {one_line(record.name)}{error}")
    return lines


def _wrap(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _paint(text: str, status: str, colour: bool) -> str:
    code = _COLOURS.get(status)
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code else text
