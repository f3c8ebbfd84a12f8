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

from posenc.attn.call import Call
from posenc.checks import nearest
from posenc.protocol import Array


def _nothing(call: Call) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes
    ----------
    name
        As in ``implementation=name``.
    run
        Computes ``(B, H, Q, Dv)`` and the log-sum-exp ``(B, H, Q)`` from a call; None for the
        second where it has none.
    unsupported
        Why it cannot serve a call; None if it can.
    not_preferred
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
    unsupported: Callable[[Call], str | None] = _nothing
    not_preferred: Callable[[Call], str | None] = _nothing
    without_lse: Callable[[Call], str | None] = _nothing
    takes_sink: bool = False
    rows: bool = False

    def why_not(self, call: Call) -> str | None:
        """Why it cannot serve a call; None if it can."""
        name = type(call.scheme).__name__
        if not self.rows and "adjust_scores" in call.scheme.hooks():
            return (
                f"{name} adjusts whole rows of scores, which no implementation but 'reference' has"
            )
        for part in call.regions or (call,):
            if (why := self.unsupported(part)) is not None:
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
    """What ``explain`` returns: ``implementation`` (a name) and ``others`` (name -> reason)."""

    def __str__(self) -> str:
        lines = [f"implementation: {self['implementation']}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self["others"].items()])


def choose(implementations: Sequence[Implementation], call: Call, name: str) -> Implementation:
    """The implementation that serves ``call``, under its name or, for ``"auto"``, the first that
    may.

    No implementation after it is asked: a question about lengths stays in a program that is
    exported.

    Raises
    ------
    NotImplementedError
        The named implementation cannot serve the call; says why.
    ValueError
        No implementation has this name.
    """
    names = [implementation.name for implementation in implementations]
    if name != "auto" and name not in names:
        raise ValueError(f"unknown implementation {name!r}{nearest(name, ['auto', *names])}")
    reasons = {}
    for implementation in implementations:
        if name == "auto":
            why = implementation.not_preferred(call) or implementation.why_not(
                call
            )  # the cheaper question first
        elif name == implementation.name:
            why = implementation.why_not(call)
        else:
            continue
        if why is None:
            return implementation
        reasons[implementation.name] = why
    if name != "auto":
        why = f"implementation {name!r} cannot serve this call: {reasons[name]}"
        raise NotImplementedError(why)
    raise NotImplementedError(f"no implementation can serve this call: {reasons}")


def explain_choice(implementations: Sequence[Implementation], call: Call, name: str) -> Explanation:
    """Which implementation ``choose`` takes, and why not each of the others."""
    chosen = choose(implementations, call, name)
    served = f"{chosen.name!r} was asked for"
    if name == "auto":
        served = f"it could, and {chosen.name!r} comes first"
    others = {
        implementation.name: implementation.why_not(call)
        or (implementation.not_preferred(call) if name == "auto" else None)
        or served
        for implementation in implementations
        if implementation is not chosen
    }
    return Explanation(implementation=chosen.name, others=others)


def attend(
    implementations: Sequence[Implementation], call: Call, name: str
) -> tuple[Array, Array | None]:
    """Attention and, if the call wants it, its log-sum-exp, on the implementation that serves the
    call.

    The log-sum-exp is ``(B, H, Q)`` in the working float, ``-inf`` where nothing is seen.
    """
    implementation = choose(implementations, call, name)
    if call.regions:
        parts = [PartialAttention(*implementation.run(part)) for part in call.regions]
        found = merge_parts(parts, call)
    else:
        found = PartialAttention(*implementation.run(call))
    if call.sink is not None and not implementation.takes_sink:
        found = add_sink(found, call)
    return found.out, public_lse(found.lse, call) if call.wants_lse else None


class PartialAttention(NamedTuple):
    """Attention to some keys, ``(B, H, Q, Dv)``, and its log-sum-exp ``(B, H, Q)`` or None.

    Where nothing is seen the first is 0, and the other so low that it weighs nothing.
    """

    out: Array
    lse: Array | None


def merge_parts(parts: Sequence[PartialAttention], call: Call) -> PartialAttention:
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
    return PartialAttention(sum(terms[1:], terms[0]), highest + xp.log(total))


def add_sink(found: PartialAttention, call: Call) -> PartialAttention:
    """With a logit of no key in the denominator: ``out * sigmoid(lse - sink)``."""
    xp, sink = call.xp, call.sink
    assert found.lse is not None
    # So far below, the share of keys is 0, and its gradient must be a number.
    ahead = xp.maximum(found.lse - sink, xp.zeros_like(found.lse) - _FAR_BELOW)
    share = 1 / (1 + xp.exp(-ahead))
    out = xp.astype(found.out, call.dtype) * share[..., None]
    # log(exp(lse) + exp(sink)), of two numbers of which the first may be the lowest.
    return PartialAttention(
        out, xp.maximum(found.lse, sink) + xp.log1p(xp.exp(-xp.abs(found.lse - sink)))
    )


def append_sink_key(
    call: Call, k: Array, v: Array, bias: Array | None, seen: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """Keys, values, bias and visibility with one more key of zeros, which makes the sink.

    Its score is its bias, the sink, and its value is 0. For an implementation that takes a whole
    bias and has no log-sum-exp.
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


def public_lse(lse: Array | None, call: Call) -> Array:
    """A log-sum-exp as callers get it: ``-inf`` where nothing is seen."""
    xp = call.xp
    assert lse is not None
    lse = xp.astype(lse, call.dtype, copy=False)
    nothing = lse <= float(xp.finfo(call.dtype).min) / 2
    return xp.where(nothing, -math.inf, lse)
