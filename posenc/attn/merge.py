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
from posenc.contract.operations import detached, device
from posenc.contract.protocol import Array, Namespace

_FAR_BELOW = 80.0  # exp(80) is finite in float32, and its inverse below any rounding


class LogSumExp(NamedTuple):
    """A log-sum-exp ``highest + log_total``, each ``(B, H, Q)``.

    They stay apart: where scores are large, their sum has no digits left for ``log_total``, which
    tells one key from two. ``highest`` may be the highest score, held constant, so that
    ``log_total`` has the whole gradient. Or it is a log-sum-exp that a kernel rounded, beside 0.

    Without a visible key ``highest`` is the lowest finite number, as a visible score may be too,
    and ``log_total`` is ``-inf``: such a part has no weight.
    """

    highest: Array
    log_total: Array

    @classmethod
    def of_weights(cls, highest: Array, total: Array, xp: Namespace) -> LogSumExp:
        """Of the sum of weights ``exp(score - highest)``, which is 0 without a visible key."""
        no_key = total == 0
        return cls(highest, xp.where(no_key, -math.inf, xp.log(xp.where(no_key, 1.0, total))))

    @classmethod
    def of_kernel(cls, lse: Array, lowest: float, xp: Namespace) -> LogSumExp:
        """Of a kernel's log-sum-exp; without a visible key it is ``lowest`` or lower."""
        no_key = lse <= lowest
        at_least = float(xp.finfo(lse.dtype).min)
        return cls(xp.where(no_key, at_least, lse), xp.where(no_key, -math.inf, xp.zeros_like(lse)))

    def minus(self, other: Array) -> Array:
        """``self - other``, without rounding where the two are near each other."""
        return (self.highest - other) + self.log_total

    def rounded(self) -> Array:
        """The sum, ``(B, H, Q)``."""
        return self.highest + self.log_total


class PartialAttention(NamedTuple):
    """Attention to some of the keys, ``(B, H, Q, Dv)``, and its log-sum-exp or None.

    For a query without a visible key among them, ``out`` is 0.
    """

    out: Array
    lse: LogSumExp | None


def merge_parts(parts: Sequence[PartialAttention], call: Call) -> PartialAttention:
    """Attention to all keys, from attention to each part of them; each key is in one part only."""
    xp = call.xp
    logs = [part.lse for part in parts if part.lse is not None]
    assert len(logs) == len(parts)
    highest = detached(logs[0].highest, xp)
    for log in logs[1:]:
        highest = xp.maximum(highest, detached(log.highest, xp))
    shares = [xp.exp(log.minus(highest)) for log in logs]
    total = sum(shares[1:], shares[0])
    lse = LogSumExp.of_weights(highest, total, xp)
    total = xp.where(total == 0, 1.0, total)
    terms = [
        xp.astype(part.out, call.dtype) * (share / total)[..., None]
        for part, share in zip(parts, shares, strict=True)
    ]
    return PartialAttention(sum(terms[1:], terms[0]), lse)


def add_sink(part: PartialAttention, call: Call) -> PartialAttention:
    """Attention with the call's sink in the denominator: ``out * sigmoid(lse - sink)``."""
    xp, lse, sink = call.xp, part.lse, call.sink
    assert lse is not None
    assert sink is not None
    ahead = lse.minus(sink)
    # Bounded, because the gradient of exp must be finite. At the bound, the share of the keys is
    # below any rounding.
    ahead = xp.maximum(ahead, xp.zeros_like(ahead) - _FAR_BELOW)
    share = 1 / (1 + xp.exp(-ahead))
    out = xp.astype(part.out, call.dtype) * share[..., None]
    highest = xp.maximum(detached(lse.highest, xp), detached(sink, xp))
    log_total = xp.log(xp.exp(lse.minus(highest)) + xp.exp(sink - highest))
    return PartialAttention(out, LogSumExp(highest, log_total))


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


def public_lse(lse: LogSumExp | None, call: Call) -> Array:
    """The log-sum-exp that a caller gets: ``-inf`` for a query without a visible key."""
    assert lse is not None
    return call.xp.astype(lse.rounded(), call.dtype, copy=False)
