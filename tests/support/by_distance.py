"""Attention with RoPE at any distances, in float64 from the formula: nothing of the library."""

from __future__ import annotations

import numpy as np


def attention_by_distance(
    q, k, v, distance, *, base=10_000.0, layout="half", factor=1.0, seen=None
):
    """``softmax(factor Re sum_c q_c conj(k_c) exp(i distance base**(-2c/D)) / sqrt(D)) v``.

    ``distance (Q, K)`` are real numbers, ``factor`` broadcasts to ``(Q, 1)``.
    """
    dim = q.shape[-1]
    q, k = (_pairs(a, layout) for a in (q, k))
    angle = distance[..., None] * base ** (-np.arange(dim // 2) * 2 / dim)
    products = np.einsum("bhic,bhjc,ijc->bhij", q, np.conj(k), np.exp(1j * angle)).real
    scores = factor * products / np.sqrt(dim)
    scores = scores if seen is None else np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def _pairs(x, layout):
    """Pairs of channels as complex numbers."""
    if layout == "half":
        return x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]
    return x[..., 0::2] + 1j * x[..., 1::2]


def mirrored(distance):
    """Distances ``(Q, K)`` of keys up to the query, and for later ones those of the swapped pair.

    ``distance`` is a function of ``i`` and ``j <= i``.
    """

    def full(i, j):
        early, late = np.maximum(i, j), np.minimum(i, j)
        return np.sign(i - j) * distance(early, late)

    return full
