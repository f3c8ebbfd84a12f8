"""Attention of some heads and all its gradients in float64, by the formula.

It computes a block of queries at a time, so memory is linear in the length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

import posenc
from harness.record import finite
from harness.run import FORWARD, STEP, Arrays, params_of
from harness.variants import Inputs
from posenc.contract.protocol import Array, Namespace, PositionScheme
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR

_PAIRS = 2**33  # pairs of tokens per scheme and length: about a second on a data-center GPU
_BLOCK_PAIRS = 2**26  # pairs at a time, 512 MiB per array
_TOKENS = 128  # tokens whose errors count together
_MIN_RMS = 1e-3  # expected numbers count as at least this large, by root mean square
_OF_TOKENS = ("out", "out of step", "q", "k", "v")  # arrays with a row per token


class Expected:
    """Results and gradients of some heads in float64, computed once for each scheme."""

    def __init__(self, inputs: Inputs) -> None:
        runner, xp = inputs.runner, inputs.runner.xp()
        chosen = chosen_heads(inputs.heads, inputs.length)
        self._inputs, self._heads = inputs, runner.array(np.array(chosen, np.int32))
        self._rows = block_length(len(chosen), inputs.length)
        self._block = runner.jitted(partial(block, xp, self._rows))
        self._errors = runner.jitted(self._relative)
        self._known: dict[str, Mapping[str, Array]] = {}

    def errors(
        self, scheme: str, answers: Mapping[str, Array]
    ) -> dict[str, dict[str, float | None]]:
        """Errors of a variant's arrays as they are recorded, and the largest that are right.

        Half precision rounds params' gradients as often as others, but many more numbers are
        summed.
        """
        if scheme not in self._known:
            with self._inputs.runner.wide():
                self._known[scheme] = self._compute(scheme)
            self._inputs.runner.release()  # blocks of memory that calls may need
        known, found = self._known[scheme], {}
        for name, error in self._errors(answers, {n: known[n] for n in answers}).items():
            factor = 1 if name in _OF_TOKENS else REDUCTION_FACTOR
            allowed = float(f"{factor * ATTENTION_TOL[self._inputs.dtype]:.3g}")
            found[name] = {"relative": finite(float(error)), "allowed": allowed}
        return found

    def _relative(
        self, answers: Mapping[str, Array], expected: Mapping[str, Array]
    ) -> dict[str, Array]:
        xp = self._inputs.runner.xp()
        own = {n: self._some(a) if a.ndim == 4 else a[self._heads] for n, a in answers.items()}
        return {
            name: relative_error(xp, xp.astype(a, xp.float32), expected[name])
            for name, a in own.items()
        }

    def _some(self, tokens: Array) -> Array:
        """Chosen heads of the first sequence, ``(h, L, D)``, from the framework's layout."""
        runner, first = self._inputs.runner, tokens[0]
        if runner.axes is not None:
            first = runner.xp().permute_dims(first, (1, 0, 2))
        return first[self._heads]

    def _compute(self, name: str) -> dict[str, Array]:
        inputs, runner, xp = self._inputs, self._inputs.runner, self._inputs.runner.xp()
        tokens = *inputs.tokens.values(), inputs.d_out
        q, k, v, d_out = (xp.astype(self._some(a), xp.float64) for a in tokens)
        at = runner.array(np.arange(inputs.length, dtype=np.int32))
        params = {n: xp.astype(a, xp.float64) for n, a in inputs.params(name).items()}
        scheme, no_bias = inputs.schemes[name], xp.zeros_like(q[:, :, 0])

        def by_distance(arrays: Arrays) -> Array:
            own = params_of(arrays)
            bias = bias_by_distance(xp, scheme, own, arrays["at"], xp.float64)
            return no_bias if bias is None else bias[self._heads]

        given = {"at": at, **params}
        (bias,), _ = runner.ready(by_distance, given, FORWARD).answers()
        outs, d_qs, sums = [], [], [xp.zeros_like(k), xp.zeros_like(v), no_bias]
        for first in range(0, inputs.length, self._rows):
            # Keys after the last query are not visible; a program is compiled for one length.
            upto = inputs.length if runner.compiles else first + self._rows
            seen = [a[:, :upto] for a in (k, v, bias)]
            out, d_q, *parts = self._block(first, at[:upto], q, d_out, *seen)
            sums = [
                xp.concat([a[:, :upto] + part, a[:, upto:]], axis=1)
                for a, part in zip(sums, parts, strict=True)
            ]
            outs.append(out)
            d_qs.append(d_q)
        out, d_q = (xp.concat(parts, axis=1) for parts in (outs, d_qs))
        found = {"out": out, "out of step": out, "q": d_q, "k": sums[0], "v": sums[1]}
        if params:
            step = runner.ready(
                by_distance, given, STEP, learned=list(params), d_out=lambda _: [sums[2]]
            )
            gradients = params_of(step.answers()[1])
            found |= {n: a[self._heads] for n, a in gradients.items()}
        return {n: xp.astype(a, xp.float32) for n, a in found.items()}


def block(
    xp: Namespace,
    rows: int,
    first: int,
    at: Array,
    q: Array,
    d_out: Array,
    k: Array,
    v: Array,
    bias: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    """Result and gradient of ``rows`` queries from ``first`` on, and what they add to others.

    Others are the gradients of keys, of values, and of the bias by distance. ``at`` are the keys'
    positions.
    """
    here = at[:rows] + first
    out, d_q, d_k, d_v, diagonals = attend(
        xp, q[:, here], k, v, d_out[:, here], bias, here[:, None] - at
    )
    # Distances of the last query, of which none is larger than its position.
    wide = xp.concat([xp.flip(diagonals, axis=-1), xp.zeros_like(bias)], axis=-1)
    d_bias = wide[:, at + (len(at) - 1 - first)]
    return out, d_q, d_k, d_v, d_bias


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
