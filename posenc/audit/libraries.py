"""``audit_libraries``: what the known libraries compute, as far as they are installed.

A library is known by an entry point of the group ``posenc.audited``, whose name is that of its
package on the index. The entry point is its adapter: a function ``candidates(grid)`` that gives
``Candidate`` objects. Another package adds a library in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Any

from posenc.audit.candidate import Candidate, CannotExpressError, Sizes, said
from posenc.audit.record import Record, Status
from posenc.contract.checks import check_choice

GROUP = "posenc.audited"
GRIDS = ("full", "ci")

NEEDS_GPU = {
    "flash-attn": "its rotary kernels, slopes of ALiBi and windows",
    "transformer-engine": "its fused rotation and windows",
}
"""Libraries that run on a GPU alone, and what runs there. They have no adapter."""

Adapter = Callable[[str], Iterable[Candidate]]


def libraries() -> dict[str, EntryPoint]:
    """Adapters of the known libraries, by the name of the package."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return {entry.name: entry for entry in found}


def audit_libraries(names: Sequence[str] | None = None, grid: str = "full") -> list[Record]:
    """Audit the libraries' own implementations of every scheme that they have.

    Warnings of the libraries are not shown: they are about their own interfaces.

    Parameters
    ----------
    names
        Packages, such as ``["transformers"]``. Default: all that are known.
    grid
        ``full``, or ``ci``, which takes a minute on a CPU.

    Returns
    -------
    The records of ``posenc.audit.audit.audit`` for each candidate, and one for a library that is
    not installed, or whose adapter raised.

    Raises
    ------
    ValueError
        A name, or the grid, is unknown.
    """
    check_choice("grid", grid, GRIDS)
    known = libraries()
    every = (*known, *NEEDS_GPU)
    for name in names or ():
        check_choice("library", name, every)
    records: list[Record] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in every if names is None else dict.fromkeys(names):
            records += _library(name, known.get(name), grid)
    return records


def candidates(name: str, grid: str = "full") -> list[Candidate]:
    """The candidates of one library's adapter.

    Raises
    ------
    ValueError
        No adapter has this name.
    """
    check_choice("library", name, libraries())
    adapter: Adapter = libraries()[name].load()
    return list(adapter(grid))


def function(
    name: str, subject: str, label: str, path: str, num_heads: int, head_dim: int, max_len: int
) -> Callable[..., Any]:
    """The function of one candidate, as the reproducers of records call it.

    Raises
    ------
    ValueError
        The adapter has no such candidate.
    """
    every = {(each.subject, each.label, each.path): each for each in candidates(name)}
    if (subject, label, path) not in every:
        listed = "; ".join(map(str, every))
        raise ValueError(f"{name} has no {(subject, label, path)}, but {listed}")
    return every[subject, label, path].make(Sizes(num_heads, head_dim, max_len))


def _library(name: str, entry: EntryPoint | None, grid: str) -> list[Record]:
    def one(status: Status, message: str) -> list[Record]:
        return [Record(name, name, "", "library", status, version=number, message=message)]

    number = ""
    gpu = f"; it needs a GPU for {NEEDS_GPU[name]}" if name in NEEDS_GPU else ""
    try:
        number = version(name)
    except PackageNotFoundError:
        return one("not installed", f"{name} is not installed{gpu}")
    if entry is None:
        what = NEEDS_GPU.get(name, "it")
        return one("not called", f"{name} needs a GPU for {what}, and has no adapter")
    records: list[Record] = []
    try:
        adapter: Adapter = entry.load()
        for candidate in adapter(grid):
            records += _candidate(candidate, grid)
    except ModuleNotFoundError as error:
        if error.name and "." not in error.name and find_spec(error.name) is None:
            return records + one("not installed", f"{name} needs {error.name}, which is not")
        return records + one("not called", f"its adapter raised {said(error)}")
    except Exception as error:  # an adapter for another version of the library
        return records + one("not called", f"its adapter raised {said(error)}")
    return records or one("not called", "its adapter gave no candidate")


def _candidate(candidate: Candidate, grid: str) -> list[Record]:
    from posenc.audit.audit import audit

    if not candidate.reproducer:
        own = (candidate.library, candidate.subject, candidate.label, candidate.path)
        sizes = ", ".join(f"{size}={{{size}}}" for size in ("num_heads", "head_dim", "max_len"))
        made = f"from posenc.audit.libraries import function; f = function(*{own!r}, {sizes})"
        candidate = replace(candidate, reproducer=made)
    try:
        records = audit(replace(candidate, make=_guarded(candidate.make)), grid)
        return _every_check(records)
    except Exception as error:
        return [
            Record(
                candidate.library, candidate.subject, candidate.label, "call", "not called",
                version=candidate.version, path=candidate.path,
                message=f"it raised {said(error)}",
            )
        ]  # fmt: skip


def _every_check(records: list[Record]) -> list[Record]:
    """One record of what cannot be expressed in any check, for the same reason."""
    lacking = [record for record in records if record.status == "cannot express"]
    others = [r for r in records if r not in lacking and r.check != "the call"]
    if others or len({record.message for record in lacking}) != 1:
        return records
    return [replace(lacking[0], check="every check", dtype="")]


def _guarded(make: Callable[[Sizes], Callable[..., Any]]) -> Callable[[Sizes], Callable[..., Any]]:
    """``make`` whose errors say that the function could not be called."""
    from posenc.audit.conventions import NotCalledError

    def made(sizes: Sizes) -> Callable[..., Any]:
        try:
            return make(sizes)
        except CannotExpressError:
            raise
        except Exception as error:
            raise NotCalledError(f"it could not be made: {said(error)}") from error

    return made
