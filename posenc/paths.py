"""Which way of computing attention serves a call: one mechanism for every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posenc.call import Call
from posenc.checks import nearest
from posenc.protocol import Array


def _nothing(call: Call) -> None:
    return None


@dataclass(frozen=True)
class Path:
    """One way to compute attention.

    Attributes
    ----------
    name
        As in ``path=name``.
    run
        Computes ``(B, H, Q, Dv)`` from a call.
    refuse
        Why it cannot serve a call; None if it can.
    avoid
        Why ``"auto"`` passes it by though it could; None if it does not.
    """

    name: str
    run: Callable[[Call], Array]
    refuse: Callable[[Call], str | None] = _nothing
    avoid: Callable[[Call], str | None] = _nothing


class Explanation(dict[str, Any]):
    """What ``explain`` returns: ``path``, the name that serves, and ``others``, name -> why not."""

    def __str__(self) -> str:
        lines = [f"path: {self['path']}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self["others"].items()])


def choose(paths: Sequence[Path], call: Call, name: str) -> Path:
    """The path that serves ``call``, under its name or, for ``"auto"``, the first that may.

    No path after it is asked: a question about lengths stays in a program that is exported.

    Raises
    ------
    NotImplementedError
        The named path cannot serve the call; says why.
    ValueError
        No path has this name.
    """
    names = [path.name for path in paths]
    if name != "auto" and name not in names:
        raise ValueError(f"unknown path {name!r}{nearest(name, ['auto', *names])}")
    reasons = {}
    for path in paths:
        if name == "auto":
            why = path.avoid(call) or path.refuse(call)  # the cheaper question first
        elif name == path.name:
            why = path.refuse(call)
        else:
            continue
        if why is None:
            return path
        reasons[path.name] = why
    if name != "auto":
        raise NotImplementedError(f"path {name!r} cannot serve this call: {reasons[name]}")
    raise NotImplementedError(f"no path can serve this call: {reasons}")


def explained(paths: Sequence[Path], call: Call, name: str) -> Explanation:
    """Which path ``choose`` takes, and why not each of the others."""
    chosen = choose(paths, call, name)
    served = f"{chosen.name!r} was asked for"
    if name == "auto":
        served = f"it could, and {chosen.name!r} comes first"
    others = {
        path.name: path.refuse(call) or (path.avoid(call) if name == "auto" else None) or served
        for path in paths
        if path is not chosen
    }
    return Explanation(path=chosen.name, others=others)
