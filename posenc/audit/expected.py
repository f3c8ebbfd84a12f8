"""The file of expected failures: differences that are known, and may not outlive their bug.

It is plain text, one ``Record.name`` a line. Lines that start with ``#`` are the reason of the line
below them, and so is what follows ``" # "`` in that line. A file is strict: a line whose check
agrees now is an error, so that a mended bug leaves the file. So is a line that names no check of a
subject that was audited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posenc.audit.record import Record, exit_status
from posenc.contract.checks import nearest

_FAILURES = ("differs", "not called")
_FORM = "library | subject | scheme | path | dtype | check"


@dataclass(frozen=True)
class Line:
    """One line of the file.

    Attributes
    ----------
    name
        The ``Record.name`` that it expects to fail.
    place
        ``FILE:NUMBER``, for messages.
    reason
        Its comment: in the line, or in the lines right above it.
    """

    name: str
    place: str
    reason: str = ""


@dataclass(frozen=True)
class Judged:
    """Records held against the file.

    Attributes
    ----------
    expected
        Reasons of the failures that the file expects, by ``Record.name``.
    errors
        Lines that must leave the file, in sentences.
    notes
        Lines that this run says nothing about, in sentences.
    """

    expected: Mapping[str, str] = field(default_factory=dict)
    errors: Sequence[str] = ()
    notes: Sequence[str] = ()

    def expects(self, record: Record) -> bool:
        """Whether the file expects the failure of this record."""
        return record.status in _FAILURES and _plain(record.name) in self.expected

    def reason(self, record: Record) -> str:
        """The reason that the file gives."""
        return self.expected[_plain(record.name)] or "in the file of expected failures"

    def exit_status(self, records: Iterable[Record]) -> int:
        """``exit_status`` of the records, expected failures being none; 1 if a line must leave.

        It is 2 where nothing ran, as none of the libraries is installed.
        """
        judged = [replace(r, status="agrees") if self.expects(r) else r for r in records]
        if self.errors:
            return 1
        ran = any(record.status in ("agrees", *_FAILURES) for record in judged)
        return exit_status(judged) if ran else 2


def read(path: str | Path) -> list[Line]:
    """The lines of a file of expected failures.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is no text, or a line is no name of a record, or is there twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from error
    except OSError as error:
        raise OSError(error.errno, f"cannot read: {error.strerror}", str(path)) from error
    lines: dict[str, Line] = {}
    above: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        place = f"{path}:{number}"
        if raw.strip().startswith("#"):
            above.append(raw.strip().lstrip("#").strip())
            continue
        given, _, comment = raw.partition(" # ")
        name = _plain(given)
        if not name:
            above = []
            continue
        parts = [part.strip() for part in name.split("|")]
        if len(parts) < 3 or not all(parts):
            raise ValueError(f"{place}: a line must be the name of a check, {_FORM}, got {name!r}")
        if name in lines:
            raise ValueError(f"{place}: {name!r} is in {lines[name].place} already")
        lines[name] = Line(name, place, comment.strip() or " ".join(filter(None, above)))
        above = []
    return list(lines.values())


def judge(records: Sequence[Record], lines: Sequence[Line], grid: str = "full") -> Judged:
    """Hold records against the lines of a file.

    Parameters
    ----------
    records
        Those of one run.
    lines
        Those of the file.
    grid
        That of the run. A smaller one than ``full`` leaves checks out, so that a line without a
        record is no error.
    """
    of_name: dict[str, list[Record]] = {}
    for record in records:
        of_name.setdefault(_plain(record.name), []).append(record)
    ran = {_subject(name) for name, same in of_name.items() if _ran(same)}
    expected: dict[str, str] = {}
    errors, notes = [], []
    for line in lines:
        found = {record.status for record in of_name.get(line.name, ())}
        if found & {*_FAILURES}:
            expected[line.name] = line.reason
        elif "agrees" in found:
            errors.append(f"{line.place}: this check agrees now, so remove the line: {line.name}")
        elif found:
            notes.append(f"{line.place}: {', '.join(sorted(found))}: {line.name}")
        elif _subject(line.name) not in ran:
            notes.append(f"{line.place}: not audited in this run: {line.name}")
        elif grid != "full":
            notes.append(f"{line.place}: not in the grid {grid!r}: {line.name}")
        else:
            hint = nearest(line.name, sorted(of_name), listing="`--json`")
            errors.append(f"{line.place}: no check has this name: {line.name}{hint}")
    return Judged(expected, errors, notes)


def _plain(name: str) -> str:
    """A name with single spaces, as a line of the file holds it."""
    return " ".join(name.split())


def _subject(name: str) -> tuple[str, ...]:
    """The first two parts of a name: library and subject, or subject and scheme."""
    return tuple(part.strip() for part in name.split("|")[:2])


def _ran(records: Iterable[Record]) -> bool:
    return any(record.status != "not installed" for record in records)
