"""Combine attention over parts of the keys, and add a sink, by the log-sum-exp.

An implementation only has to return its log-sum-exp: sinks and regions of distances then need
nothing else from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from posenc.apply.shapes import common_size
from posenc.attn.call import Call
from posenc.contract.operations import device
from posenc.contract.protocol import Array

_FAR_BELOW = 80.0  # exp(80) is finite in float32, and its inverse below any rounding


class PartialAttention(NamedTuple):
    """Attention to some of the keys, ``(B, H, Q, Dv)``, and its log-sum-exp ``(B, H, Q)`` or None.

    For a query without a visible key among them, ``out`` is 0. Its ``lse`` is at most half of the
    lowest finite number, so the merge gives this part no weight.
    """

    out: Array
    lse: Array | None


def merge_parts(parts: Sequence[PartialAttention], call: Call) -> PartialAttention:
    """Attention to all keys, from attention to each part of them; each key is in one part only."""
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


def add_sink(part: PartialAttention, call: Call) -> PartialAttention:
    """Attention with the call's sink in the denominator: ``out * sigmoid(lse - sink)``."""
    xp, sink = call.xp, call.sink
    assert part.lse is not None
    # Bounded, because the gradient of exp must be finite. At the bound, the share of the keys is
    # below any rounding.
    ahead = xp.maximum(part.lse - sink, xp.zeros_like(part.lse) - _FAR_BELOW)
    share = 1 / (1 + xp.exp(-ahead))
    out = xp.astype(part.out, call.dtype) * share[..., None]
    # Finite even where lse is the lowest finite number.
    return PartialAttention(out, xp.logaddexp(part.lse, sink))


def append_sink_key(
    call: Call, k: Array, v: Array, bias: Array | None, visible: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """Keys, values, bias and visible pairs with one more key, which acts as the sink.

    The key and its value are 0, and its bias is the sink, so its score is the sink. For an
    implementation that takes a dense bias and has no log-sum-exp.
    """
    xp, sink = call.xp, call.sink
    assert sink is not None
    rows, columns, here = call.q.shape[2], call.k.shape[2], device(call.q)
    if bias is None:
        bias = xp.zeros((1, 1, rows, columns), dtype=sink.dtype, device=here)
    shape = [common_size(*sizes) for sizes in zip(bias.shape[:2], sink.shape[:2], strict=True)]
    bias = xp.broadcast_to(bias, (*shape, rows, columns))
    bias = xp.concat([bias, xp.broadcast_to(sink[..., None], (*shape, rows, 1))], axis=-1)
    k, v = (xp.concat([a, xp.zeros_like(a[:, :, :1, :])], axis=2) for a in (k, v))
    if visible is not None:
        visible = xp.broadcast_to(visible, (*visible.shape[:2], rows, columns))
        visible = xp.concat([visible, xp.ones_like(visible[..., :1])], axis=-1)
    return k, v, bias, visible


def public_lse(lse: Array | None, call: Call) -> Array:
    """The log-sum-exp that a caller gets: ``-inf`` for a query without a visible key."""
    xp = call.xp
    assert lse is not None
    lse = xp.astype(lse, call.dtype, copy=False)
    fully_masked = lse <= float(xp.finfo(call.dtype).min) / 2
    return xp.where(fully_masked, -math.inf, lse)
