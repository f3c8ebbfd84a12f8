"""``Run``: what reports say about the run of an audit; and what all of them count and order."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import posenc
from posenc.audit.expected import Judged
from posenc.audit.record import Record

ORDER = ("differs", "not called", "agrees", "cannot express", "not installed")
EXPECTED = "expected"
_FRAMEWORKS = ("numpy", "torch", "jax")


@dataclass(frozen=True)
class Run:
    """One run of ``posenc audit``.

    Attributes
    ----------
    command
        The command, so that a report can be repeated.
    grid
        ``full`` or ``ci``.
    seconds
        How long it took.
    versions
        Of posenc, Python, and the frameworks that were imported.
    platform
        Of the machine.
    time
        When it ended, in UTC, ``2026-11-25T16:42:00``.
    """

    command: str = "posenc audit"
    grid: str = "full"
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=lambda: versions())
    platform: str = field(default_factory=platform.platform)
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()))


def versions() -> dict[str, str]:
    """Versions of posenc, Python, and of each framework that this process has imported."""
    found = {"posenc": posenc.__version__, "python": platform.python_version()}
    for name in _FRAMEWORKS:
        if name in sys.modules:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


@dataclass(frozen=True)
class Group:
    """The records of one library, version and subject."""

    library: str
    version: str
    subject: str
    records: Sequence[Record]

    @property
    def title(self) -> str:
        """``library version  subject``, of which a function of one's own has the last alone."""
        return title(self.records[0])


def groups(records: Iterable[Record]) -> list[Group]:
    """Records by library, version and subject, in the order of their first ones."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        key = (record.library, record.version, record.subject)
        found.setdefault(key, []).append(record)
    return [Group(*key, of) for key, of in found.items()]


def ran_groups(records: Iterable[Record]) -> list[Group]:
    """The groups of what is installed."""
    return groups(record for record in records if record.status != "not installed")


def absent(records: Iterable[Record]) -> str:
    """``not installed: a, b``; ``""`` if all are."""
    found = dict.fromkeys(r.library or r.subject for r in records if r.status == "not installed")
    return f"not installed: {', '.join(found)}" if found else ""


def counted(records: Iterable[Record], judged: Judged) -> dict[str, int]:
    """How many records have each status, worst first; expected failures are a status here."""
    count = Counter(EXPECTED if judged.expects(r) else r.status for r in records)
    return {status: count[status] for status in (ORDER[0], ORDER[1], EXPECTED, *ORDER[2:])
            if count[status]}  # fmt: skip


def in_words(counts: dict[str, int]) -> str:
    """``3 differ, 12 agree``."""
    plural = {"differs": "differ", "agrees": "agree", EXPECTED: "fail as expected"}
    single = {"differs": "differs", "agrees": "agrees", EXPECTED: "fails as expected"}
    return ", ".join(
        f"{n} {(single if n == 1 else plural).get(status, status)}" for status, n in counts.items()
    ) or "nothing"  # fmt: skip


def failures(records: Iterable[Record], judged: Judged) -> Iterator[Record]:
    """What differs or could not be called, and is not expected to; the former first."""
    unexpected = [record for record in records if not judged.expects(record)]
    for status in ("differs", "not called"):
        yield from (record for record in unexpected if record.status == status)


def verdict(records: Sequence[Record], judged: Judged) -> str:
    """The exit status in a sentence."""
    if judged.errors:
        return "Lines must leave the file of expected failures."
    status = judged.exit_status(records)
    if status == 1:
        return "Something differs from its definition."
    if status == 2:
        called = any(record.status == "not called" for record in records)
        return "Something could not be called." if called else "Nothing was audited."
    return "Everything that was audited agrees, or differs as expected."


def title(record: Record) -> str:
    """Whose code it is: ``library version subject``."""
    subject = record.subject if record.subject != record.library else ""
    return one_line(f"{record.library} {record.version} {subject}")


def conditions(record: Record) -> str:
    """What was checked: ``scheme, check, path, dtype``."""
    parts = (record.scheme, record.check, record.path, record.dtype)
    return one_line(", ".join(filter(None, parts)))


def number(value: float | None) -> str:
    """A number with two digits, as ``1.2e-07``; ``""`` for none."""
    if value is None:
        return ""
    return f"{value:.2g}" if math.isfinite(value) else ("NaN" if math.isnan(value) else "infinite")


def place(record: Record) -> str:
    """The first place that differs: ``position 32, row 1``."""
    return one_line(", ".join(f"{name} {value}" for name, value in record.where.items()))


def measured(record: Record) -> str:
    """``first at …, error …, tolerance …``; the place only if the message does not have it."""
    at = place(record)
    facts = {
        "first at": "" if at in one_line(record.message) else at,
        "error": number(record.error),
        "tolerance": number(record.tolerance),
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def one_line(text: str) -> str:
    """Text without line ends; a control character becomes an escape."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
