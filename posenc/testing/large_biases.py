"""How far the rounding of large biases may carry attention: what tolerances leave out.

``tolerances.ATTENTION_TOL`` is a bound for scores and biases up to 8. A bias of ``b`` has a
rounding of ``b * u``, which no implementation can avoid: with ``b = 1e5`` in float32 a score is off
by 0.006. Here the part of a bias above 8 is followed through softmax, so the bound of a call
without large biases is the same as ever, and that of a large bias on keys without weight too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from posenc.apply.shapes import as_column, as_row
from posenc.attn.call import Call
from posenc.attn.channel_decay import has_channel_decay
from posenc.contract.protocol import Hook
from posenc.testing.attention_case import AttentionCase
from posenc.testing.framework import Host
from posenc.testing.tolerances import UNIT, rounding_bound

_LARGE = 8.0  # up to here ATTENTION_TOL holds
_ROUNDINGS = 4  # of a bias: a product, two sums, and the cast of a position or a slope
_MOST = 50.0  # e**50 is finite


class Rounding(NamedTuple):
    """Bounds: of the result ``(B, H, Q, Dv)``, and of a weight, relative to it."""

    of_result: Host
    of_weight: float


def rounding_of_biases(call: AttentionCase, dtype: str = "float32") -> Rounding:
    """What the rounding of biases above 8 may add to the error of attention.

    If a score with weight ``w`` is off by at most ``e``, the result is off by at most
    ``sum(w (exp(e) - 1) |v - result|) / sum(w exp(-e))``, and a weight by ``exp(2 e) - 1``.
    """
    prepared = call.prepared()
    v = np.repeat(prepared.v, prepared.q.shape[1] // prepared.v.shape[1], axis=1)
    unit = "float64" if dtype == "float64" else "float32"  # biases are float32 in half precision
    parts = prepared.regions or (prepared,)
    scores = [visible_scores(part) for part in parts]
    errors = [
        np.broadcast_to(_error(part, unit), score.shape)
        for part, score in zip(parts, scores, strict=True)
    ]
    values = [v] * len(parts)
    if prepared.sink is not None:  # a key whose value is 0
        shape = (*scores[0].shape[:3], 1)
        scores.append(np.broadcast_to(prepared.sink[..., None], shape))
        errors.append(np.zeros(shape))
        values.append(np.zeros_like(v[:, :, :1]))
    score, error, value = (np.concatenate(a, axis=x) for a, x in (
        (scores, -1), (errors, -1), (values, -2)))  # fmt: skip
    highest = np.max(score, axis=-1, keepdims=True)
    weights = np.exp(score - np.where(np.isfinite(highest), highest, 0))
    total = np.sum(weights, axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    off = np.abs(value[:, :, None] - (weights @ value)[..., None, :])
    moved = np.sum((weights * np.expm1(error))[..., None] * off, axis=-2)
    left = np.sum(weights * np.exp(-error), axis=-1)[..., None]
    seen = np.max(error, where=weights > UNIT[unit], initial=0)
    return Rounding(moved / np.where(left == 0, 1, left), float(np.expm1(2 * seen)))


def _error(call: Call, unit: str) -> Host:
    """A bound on the rounding of each bias above 8, or of the key bias that stands for it."""
    bias, _ = call.bias_and_visible()
    size = np.zeros((1, 1, 1, 1)) if bias is None else np.abs(bias)
    if call.causal and Hook.KEY_BIAS in call.scheme.hooks():
        keys = call.scheme.key_bias(as_row(call.key.encoded_pos), params=call.views(), xp=call.xp)
        size = size if keys is None else np.maximum(size, np.abs(keys))
    large = np.maximum(size - _LARGE, 0)
    error: Host = np.minimum(_MOST, rounding_bound(_ROUNDINGS, 1, unit) * large)
    return error


def visible_scores(call: Call) -> Host:
    """Scaled scores with their bias, ``(B, H, Q, K)``; ``-inf`` for masked keys."""
    k = np.repeat(call.k, call.q.shape[1] // call.k.shape[1], axis=1)
    scores = call.scale * call.q @ np.swapaxes(k, -1, -2)
    if has_channel_decay(call.scheme):
        scores = call.channel_decay().apply(scores, call.scale * call.q, k)
    scores = call.cap_scores(scores)
    bias, visible = call.bias_and_visible()
    if Hook.ADJUST_SCORES in call.scheme.hooks():
        at = as_column(call.query.encoded_pos), as_row(call.key.encoded_pos)
        scores = call.scheme.adjust_scores(
            scores, *at, visible=visible, params=call.views(rows=True), xp=call.xp
        )
    if bias is not None:
        scores = scores + bias
    return scores if visible is None else np.where(visible, scores, -np.inf)
