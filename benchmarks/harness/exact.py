"""Attention of some heads and all its gradients in float64, by the formula.

``torch_exact`` and ``jax_exact`` call it with their namespaces. It computes a block of queries at a
time, so memory is linear in the length.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import posenc
from harness.record import finite
from harness.variants import Inputs
from posenc.contract.protocol import Array, Namespace, PositionScheme
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR

_PAIRS = 2**33  # pairs of tokens per scheme and length: about a second on a data-center GPU
_BLOCK_PAIRS = 2**26  # pairs at a time, 512 MiB per array
_TOKENS = 128  # tokens whose errors count together
_MIN_RMS = 1e-3  # expected numbers count as at least this large, by root mean square
_OF_TOKENS = ("out", "out of step", "q", "k", "v")  # arrays with a row per token


class Expected:
    """Results and gradients of some heads in float64, computed once for each scheme.

    What is compiled for it is compiled in the pool, for all schemes at the same time.
    """

    def __init__(self, inputs: Inputs, schemes: Iterable[str], pool: ThreadPoolExecutor) -> None:
        runner = inputs.runner
        heads = runner.array(np.array(chosen_heads(inputs.heads, inputs.length)))
        begin = importlib.import_module(f"harness.{runner.name}_exact").begin
        self._compute = {name: begin(inputs, name, heads, pool) for name in schemes}
        self._expected: dict[str, Mapping[str, Array]] = {}
        self._dtype, xp = inputs.dtype, runner.xp()

        def errors(answers: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, Array]:
            own = {
                name: some_heads(xp, runner.axes, a, heads) if a.ndim == 4 else a[heads]
                for name, a in answers.items()
            }
            return {
                name: relative_error(xp, xp.astype(a, xp.float32), expected[name])
                for name, a in own.items()
            }

        self._errors = runner.jitted(errors)

    def errors(
        self, scheme: str, answers: Mapping[str, Array]
    ) -> dict[str, dict[str, float | None]]:
        """Errors of a variant's arrays as they are recorded, and the largest that are right.

        Half precision rounds params' gradients as often as others, but many more numbers are
        summed.
        """
        if scheme not in self._expected:
            self._expected[scheme] = self._compute[scheme]()
        known = self._expected[scheme]
        found = {}
        for name, error in self._errors(answers, {n: known[n] for n in answers}).items():
            factor = 1 if name in _OF_TOKENS else REDUCTION_FACTOR
            allowed = float(f"{factor * ATTENTION_TOL[self._dtype]:.3g}")
            found[name] = {"relative": finite(float(error)), "allowed": allowed}
        return found


def some_heads(xp: Namespace, axes: Any, tokens: Array, heads: Array) -> Array:
    """Some heads of the first sequence, ``(h, L, D)``, from a framework's order of axes."""
    first = tokens[0] if axes is None else xp.permute_dims(tokens[0], (1, 0, 2))
    return first[heads]


def chosen_heads(heads: int, length: int) -> list[int]:
    """Heads that are compared: the first, the last and as many between as time allows."""
    count = min(heads, max(2, _PAIRS // length**2))
    return [int(head) for head in np.linspace(0, heads - 1, count).round()]


def block_length(heads: int, length: int) -> int:
    """Queries at a time, a divisor of ``length``."""
    most = min(length, max(1, _BLOCK_PAIRS // (heads * length)))
    return next(n for n in range(most, 0, -1) if length % n == 0)


def bias_by_distance(
    xp: Namespace,
    scheme: PositionScheme,
    params: Mapping[str, Array],
    positions: Array,
    dtype: Any,
) -> Array | None:
    """The bias at distances ``0 .. L - 1``, ``(H, L)``; None without a bias.

    ``positions`` are ``0 .. L - 1``.
    """
    row = posenc.bias(scheme, positions[-1:], positions, params, dtype=dtype, xp=xp)
    return None if row is None else xp.flip(row[:, 0], axis=-1)


def attend(
    xp: Namespace, q: Array, k: Array, v: Array, d_out: Array, bias: Array, distance: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Causal attention of a block of queries, and what it adds to gradients.

    Parameters
    ----------
    q, d_out
        The block and the gradient of its result, ``(h, n, D)``.
    k, v
        Keys from the first on, ``(h, K, D)``.
    bias
        By distance, ``(h, L)``.
    distance
        Position of each query minus that of each key, ``(n, K)``.

    Returns
    -------
    Result, and gradients of queries, keys and values. Last the gradient of the bias, ``(h, K + n -
    1)``: its number ``c`` is for the last query's position minus ``c``, and 0 where that is
    negative.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    scores = scale * (q @ k.mT) + bias[:, xp.clip(distance, 0, None)]
    scores = xp.where(distance >= 0, scores, -xp.inf)
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    out = weights @ v
    d_weights = d_out @ v.mT - xp.sum(out * d_out, axis=-1, keepdims=True)
    d_scores = weights * d_weights
    d_bias = _sum_diagonals(xp, d_scores)
    return out, scale * (d_scores @ k), scale * (d_scores.mT @ q), weights.mT @ d_out, d_bias


def _sum_diagonals(xp: Namespace, array: Array) -> Array:
    """Sums of ``array[:, r, c - n + 1 + r]`` over the rows ``r``, by ``c``, for ``(h, n, K)``."""
    heads, n, keys = array.shape
    padded = xp.concat([xp.flip(array, axis=1), xp.zeros_like(array[:, :, :n])], axis=-1)
    # Read with rows one shorter, each row begins one further to the right than the row before.
    flat = xp.reshape(padded, (heads, n * (keys + n)))[:, : n * (keys + n - 1)]
    return xp.sum(xp.reshape(flat, (heads, n, keys + n - 1)), axis=1)


def relative_error(xp: Namespace, actual: Array, expected: Array) -> Array:
    """The largest error of 128 tokens of a head, relative to their root mean square.

    Params, ``(h, ...)``, count together.
    """
    shape = 1, 1, math.prod(expected.shape)
    if expected.ndim == 3:
        heads, length, dim = expected.shape
        tokens = _TOKENS if length % _TOKENS == 0 else length
        shape = heads, length // tokens, tokens * dim

    def norm(array: Array) -> Array:
        return xp.sqrt(xp.sum(xp.reshape(array * array, shape), axis=-1))

    least = _MIN_RMS * shape[-1] ** 0.5
    return xp.max(norm(actual - expected) / xp.clip(norm(expected), least, None))
