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


def choose(paths: Sequence[Path], call: Call, name: str) -> tuple[Path, Explanation]:
    """The path that serves ``call``, under its name or, for ``"auto"``, the first that may.

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
    refusals = {path.name: path.refuse(call) for path in paths}
    if name != "auto":
        chosen = next(path for path in paths if path.name == name)
        if refusals[name] is not None:
            raise NotImplementedError(f"path {name!r} cannot serve this call: {refusals[name]}")
        return chosen, _explanation(chosen, refusals)
    for path in paths:
        refusals[path.name] = refusals[path.name] or path.avoid(call)
    able = [path for path in paths if refusals[path.name] is None]
    if not able:
        raise NotImplementedError(f"no path can serve this call: {refusals}")
    return able[0], _explanation(able[0], refusals)


def _explanation(chosen: Path, refusals: dict[str, str | None]) -> Explanation:
    others = {
        name: why or f"{chosen.name!r} was asked for or comes first"
        for name, why in refusals.items()
        if name != chosen.name
    }
    return Explanation(path=chosen.name, others=others)
