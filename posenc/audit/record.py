"""``Record``: one thing that an audit looked at, and what it found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Status = Literal["agrees", "differs", "cannot express", "not installed", "not called"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True)
class Record:
    """One check of one subject.

    Attributes
    ----------
    library, version
        Whose code ran, as its package is named, and its version; ``""`` for a function of one's
        own.
    subject
        What was asked of it: a function, a class, or the ``config.json``.
    scheme
        The definition that it was held against, as a label of ``posenc compare``.
    check
        The check, in the words of the page, such as ``one token per row, rows at other offsets``.
    status
        ``agrees``: within ``tolerance``. ``differs``. ``cannot express``: it has no such option.
        ``not installed``. ``not called``: it raised, or returned something else than it should.
    path
        How it ran, where there are several ways: ``eager``, ``compiled``, ``cached``.
    dtype
        Of the arrays that it was given.
    message
        What was found, in a sentence for its maintainer.
    error, tolerance
        The largest difference, and the largest one that rounding explains; None where the check
        measures no such number.
    where
        The first place that differs, by name: ``position``, ``row``, ``head``, ``channel``, ...
    reproducer
        One line of Python, or one command, that shows the difference; ``""`` if it agrees.
    """

    library: str
    subject: str
    scheme: str
    check: str
    status: Status
    version: str = ""
    path: str = "eager"
    dtype: str = ""
    message: str = ""
    error: float | None = None
    tolerance: float | None = None
    where: Mapping[str, int] = field(default_factory=dict)
    reproducer: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")

    @property
    def name(self) -> str:
        """What a file of expected failures calls it: no version and no number is in it."""
        parts = (self.library, self.subject, self.scheme, self.path, self.dtype, self.check)
        return " | ".join(part for part in parts if part)

    def as_dict(self) -> dict[str, Any]:
        """Its fields and its name, of types that JSON has."""
        return {"name": self.name, **vars(self), "where": dict(self.where)}


def exit_status(records: Iterable[Record]) -> int:
    """0 where all agree, 1 where one differs, 2 where one could not be called.

    What is not installed, and what a library cannot express, is no failure. Nothing to look at is.
    """
    found = {record.status for record in records}
    if "differs" in found:
        return 1
    return 0 if found and "not called" not in found else 2
