"""Which way of computing attention serves a call, and what is put together from its result.

One mechanism for every backend: sinks and regions of distances need nothing of a kernel but its
log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from array_api_compat import device

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
        Computes ``(B, H, Q, Dv)`` and the log-sum-exp ``(B, H, Q)`` from a call; None for the
        second where it has none.
    refuse
        Why it cannot serve a call; None if it can.
    avoid
        Why ``"auto"`` passes it by though it could; None if it does not.
    without_lse
        Why it has no log-sum-exp for a call; None if it has.
    takes_sink
        Whether it puts the call's sink into the softmax by itself.
    rows
        Whether it has whole rows of scores, for a scheme that adjusts them.
    """

    name: str
    run: Callable[[Call], tuple[Array, Array | None]]
    refuse: Callable[[Call], str | None] = _nothing
    avoid: Callable[[Call], str | None] = _nothing
    without_lse: Callable[[Call], str | None] = _nothing
    takes_sink: bool = False
    rows: bool = False

    def why_not(self, call: Call) -> str | None:
        """Why it cannot serve a call; None if it can."""
        name = type(call.scheme).__name__
        if not self.rows and "adjust_scores" in call.scheme.hooks():
            return f"{name} adjusts whole rows of scores, which no path but 'reference' has"
        for part in call.regions or (call,):
            if (why := self.refuse(part)) is not None:
                return why
        needed = "return_lse=True asks for" if call.wants_lse else None
        if call.regions:
            needed = f"{name} merges its regions by"
        elif call.sink is not None and not self.takes_sink:
            needed = f"the sink of {name} is put in by"
        if needed is None or (why := self.without_lse(call)) is None:
            return None
        return f"{needed} a log-sum-exp, and {why}"


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
            why = path.avoid(call) or path.why_not(call)  # the cheaper question first
        elif name == path.name:
            why = path.why_not(call)
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
        path.name: path.why_not(call) or (path.avoid(call) if name == "auto" else None) or served
        for path in paths
        if path is not chosen
    }
    return Explanation(path=chosen.name, others=others)


def attend(paths: Sequence[Path], call: Call, name: str) -> tuple[Array, Array | None]:
    """Attention and, if the call wants it, its log-sum-exp, on the path that serves the call.

    The log-sum-exp is ``(B, H, Q)`` in the working float, ``-inf`` where nothing is seen.
    """
    path = choose(paths, call, name)
    if call.regions:
        parts = [Part(*path.run(part)) for part in call.regions]
        found = merged_parts(parts, call)
    else:
        found = Part(*path.run(call))
    if call.sink is not None and not path.takes_sink:
        found = with_sink(found, call)
    return found.out, seen_lse(found.lse, call) if call.wants_lse else None


class Part(NamedTuple):
    """Attention to some keys, ``(B, H, Q, Dv)``, and its log-sum-exp ``(B, H, Q)`` or None.

    Where nothing is seen the first is 0, and the other so low that it weighs nothing.
    """

    out: Array
    lse: Array | None


def merged_parts(parts: Sequence[Part], call: Call) -> Part:
    """Attention to all keys, from attention to keys of each part: no key may be in two of them."""
    xp = call.xp
    logs: list[Array] = [part.lse for part in parts]
    highest = logs[0]
    for log in logs[1:]:
        highest = xp.maximum(highest, log)
    shares = [xp.exp(log - highest) for log in logs]
    total = sum(shares[1:], shares[0])
    terms = [
        xp.astype(part.out, call.dtype) * (share / total)[..., None]
        for part, share in zip(parts, shares, strict=True)
    ]
    return Part(sum(terms[1:], terms[0]), highest + xp.log(total))


def with_sink(found: Part, call: Call) -> Part:
    """With a logit of no key in the denominator: ``out * sigmoid(lse - sink)``."""
    xp, sink = call.xp, call.sink
    assert found.lse is not None
    # So far below, the share of keys is 0, and its gradient must be a number.
    ahead = xp.maximum(found.lse - sink, xp.zeros_like(found.lse) - _FAR_BELOW)
    share = 1 / (1 + xp.exp(-ahead))
    out = xp.astype(found.out, call.dtype) * share[..., None]
    # log(exp(lse) + exp(sink)), of two numbers of which the first may be the lowest.
    return Part(out, xp.maximum(found.lse, sink) + xp.log1p(xp.exp(-xp.abs(found.lse - sink))))


def with_sink_key(
    call: Call, k: Array, v: Array, bias: Array | None, seen: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """Keys, values, bias and visibility with one more key of zeros, which makes the sink.

    Its score is its bias, the sink, and its value is 0. For a path that takes a whole bias and has
    no log-sum-exp.
    """
    xp, sink = call.xp, call.sink
    assert sink is not None
    rows, columns, here = call.q.shape[2], call.k.shape[2], device(call.q)
    if bias is None:
        bias = xp.zeros((1, 1, rows, columns), dtype=sink.dtype, device=here)
    shape = [max(*sizes) for sizes in zip(bias.shape[:2], sink.shape[:2], strict=True)]
    bias = xp.broadcast_to(bias, (*shape, rows, columns))
    bias = xp.concat([bias, xp.broadcast_to(sink[..., None], (*shape, rows, 1))], axis=-1)
    k, v = (xp.concat([a, xp.zeros_like(a[:, :, :1, :])], axis=2) for a in (k, v))
    if seen is not None:
        seen = xp.concat([seen, xp.ones_like(seen[..., :1])], axis=-1)
    return k, v, bias, seen


_FAR_BELOW = 80.0  # exp(80) is finite in float32, and its inverse below any rounding


def seen_lse(lse: Array | None, call: Call) -> Array:
    """A log-sum-exp as callers get it: ``-inf`` where nothing is seen."""
    xp = call.xp
    assert lse is not None
    lse = xp.astype(lse, call.dtype, copy=False)
    nothing = lse <= float(xp.finfo(call.dtype).min) / 2
    return xp.where(nothing, -math.inf, lse)
