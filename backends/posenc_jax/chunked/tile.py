"""One tile of attention: a block of queries against a block of keys, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import (
    PositionScheme,
    Side,
    bias_tile,
    visible,
)
from posenc_jax.chunked.blocks import Tiling

Arrays: TypeAlias = dict[str, Array]


class Queries(NamedTuple):
    """A block of queries: ``vectors (B, Hk, G, bq, D)``, and what is known of the tokens.

    Of ``side``, integers are ``(B or 1, 1, bq)``, features ``(B or 1, H or 1, bq)`` or with a table
    behind. In gradients, what has none is None.
    """

    vectors: Array
    side: Side


class Keys(NamedTuple):
    """A block of keys: ``vectors (B, Hk, bk, D)``, ``values (B, Hk, bk, Dv)``, as in ``Queries``.

    ``real`` is False at padding; None if there is none.
    """

    vectors: Array
    values: Array
    side: Side
    real: Array | None


class Softmax(NamedTuple):
    """A softmax over the keys so far: the highest score, and sums of ``exp(score - highest)``."""

    highest: Array
    total: Array
    summed: Array

    @classmethod
    def of_nothing(cls, rows: tuple[int, ...], dim: int, dtype: Any) -> Softmax:
        """Before the first key."""
        lowest = jnp.full(rows, jnp.finfo(dtype).min, dtype)
        return cls(lowest, jnp.zeros(rows, dtype), jnp.zeros((*rows, dim), dtype))

    def absorb(self, scores: Array, values: Array) -> Softmax:
        """With the keys of one more tile; hidden ones score ``-inf``, and their weight is 0."""
        # Never below the lowest finite number, so that no difference is one of two infinities.
        highest = jnp.maximum(self.highest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - highest[..., None])
        shrink = jnp.exp(self.highest - highest)
        # Weights stay unrounded: gradients of a bias are small differences of large sums, and the
        # backward pass, which has the unrounded ones, must find the same output.
        added = _product("bhgqk,bhkd->bhgqd", weights, values.astype(scores.dtype), scores.dtype)
        return Softmax(
            highest,
            self.total * shrink + jnp.sum(weights, axis=-1),
            self.summed * shrink[..., None] + added,
        )

    def result(self) -> tuple[Array, Array, Array]:
        """The weighted mean of values; log-sum-exp; what ``exp(score - logsumexp)`` lacks.

        The mean is 0 and the others are finite where nothing is. The last is about 1, but where
        scores are so large that the log-sum-exp has no digits left for the sum.
        """
        total = jnp.where(self.total == 0, 1, self.total)
        logsumexp = self.highest + jnp.log(total)
        return self.summed / total[..., None], logsumexp, jnp.exp(logsumexp - self.highest) / total


def scored(
    tiling: Tiling, query: Queries, key: Keys, learned: Arrays, fixed: Arrays
) -> tuple[Array, Array | None, Any]:
    """Scores ``(B, Hk, G, bq, bk)``, ``-inf`` where hidden, their slope if they are capped, and the
    transpose of the bias.

    The transpose takes gradients of scores to those of learned arrays and of features.

    XLA computes scores where the highest is found, and again where it is taken off. There it makes
    one operation of ``product * scale - highest``, so that the highest less itself is not 0 but the
    rounding of the product: for scores beyond ``3e9`` that is more than ``exp`` can hold. So a
    maximum follows, which changes no finite score. A choice would not do: XLA takes the difference
    inside of it. Scaled queries would, but are slower.
    """
    scores = _product("bhgqd,bhkd->bhgqk", query.vectors, key.vectors, tiling.dtype)
    seen = _visible(tiling, query, key)
    scores = jnp.maximum(scores * tiling.scale, jnp.finfo(scores.dtype).min)
    slope = None
    if tiling.softcap is not None:
        ratio = jnp.tanh(scores / tiling.softcap)
        scores, slope = tiling.softcap * ratio, 1 - ratio * ratio

    def bias_of(learned: Arrays, query_own: Arrays, key_own: Arrays) -> Array | None:
        at = query.side.encoded_pos[..., :, None], key.side.encoded_pos[..., None, :]
        arrays, dtype = {**learned, **fixed}, tiling.dtype
        if tiling.by_distance:
            bias = _toeplitz(tiling.scheme, *at, arrays, dtype=dtype, xp=jnp)
        else:
            own = {"query": query.side.features | query_own, "key": key.side.features | key_own}
            bias = bias_tile(tiling.scheme, *at, arrays, **own, dtype=dtype, xp=jnp)
        return None if bias is None else _grouped(bias, scores.shape)

    bias, transpose = jax.vjp(bias_of, learned, _floats(query.side), _floats(key.side))
    if bias is None:
        return _masked(scores, seen), slope, lambda _: transpose(None)
    finite = bias != -jnp.inf
    scores = _masked(scores + bias, finite if seen is None else seen & finite)
    return scores, slope, transpose


def _floats(side: Side) -> Arrays:
    """Features that have gradients: places are integers."""
    return {n: a for n, a in side.features.items() if jnp.isdtype(a.dtype, "real floating")}


def gradients(
    tiling: Tiling,
    query: Queries,
    key: Keys,
    learned: Arrays,
    fixed: Arrays,
    *rows: Array,
) -> tuple[Queries, Keys, Arrays]:
    """What a tile adds to the gradients of its queries, its keys and the learned arrays.

    ``rows``: of each query the gradient of its output, its log-sum-exp, and the product of its
    output and the gradient of that.
    """
    d_out, logsumexp, delta = rows
    product = partial(_product, dtype=tiling.dtype)
    scores, slope, transpose_bias = scored(tiling, query, key, learned, fixed)
    weights = jnp.exp(scores - logsumexp[..., None])
    d_out = d_out.astype(key.values.dtype)
    d_scores = weights * (product("bhgqd,bhkd->bhgqk", d_out, key.values) - delta[..., None])
    d_learned, d_of_query, d_of_key = transpose_bias(d_scores)
    d_scores = d_scores if slope is None else d_scores * slope
    d_scores = (d_scores * tiling.scale).astype(key.vectors.dtype)
    d_query = product("bhgqk,bhkd->bhgqd", d_scores, key.vectors)
    d_key = product("bhgqk,bhgqd->bhkd", d_scores, query.vectors)
    d_value = product("bhgqk,bhgqd->bhkd", weights.astype(d_out.dtype), d_out)
    return (
        Queries(d_query, _gradient(query.side, d_of_query)),
        Keys(d_key, d_value, _gradient(key.side, d_of_key), None),
        d_learned,
    )


def _gradient(side: Side, found: Arrays) -> Side:
    """Gradients of features, in the shape of a side; None for integers."""
    return Side(None, None, None, {n: found.get(n) for n in side.features})


def _visible(tiling: Tiling, query: Queries, key: Keys) -> Array | None:
    """Which query sees which key, ``(B or 1, 1, 1, bq, bk)``; None if each sees all."""
    q_seg = k_seg = None
    if query.side.seg is not None and key.side.seg is not None:
        q_seg, k_seg = query.side.seg[..., :, None], key.side.seg[..., None, :]
    at = query.side.pos[..., :, None], key.side.pos[..., None, :]
    seen = visible(
        *at, q_seg, k_seg,
        causal=tiling.causal, window=tiling.window, sink_tokens=tiling.sink_tokens,
    )  # fmt: skip
    if tiling.mask is not None:
        own = tiling.mask(*at, q_seg, k_seg)
        seen = own if seen is None else seen & own
    if key.real is not None:
        real = key.real[..., None, :]
        seen = real if seen is None else seen & real
    return None if seen is None else seen[:, :, None]


def _toeplitz(scheme: PositionScheme, q: Array, k: Array, *arrays: Any, **keywords: Any) -> Array:
    """``bias_tile`` of a relative scheme at consecutive positions, from ``bq + bk - 1`` distances.

    Values repeated with a period one longer than the rows they are cut into move by one column a
    row, so no element is gathered, and none is scattered in the gradient.
    """
    rows, columns = q.shape[-2], k.shape[-1]
    count = rows + columns - 1
    distances = k[..., :1] - q[..., :1, :] + jnp.arange(1 - rows, columns)
    values = bias_tile(scheme, jnp.zeros_like(distances), distances, *arrays, **keywords)
    padded = jnp.pad(values[..., 0, :], ((0, 0), (0, 0), (0, 1)))
    moved = jnp.tile(padded, rows)[..., : rows * count]
    return moved.reshape(*padded.shape[:2], rows, count)[..., rows - 1 :]


def _grouped(bias: Array, shape: tuple[int, ...]) -> Array:
    """``(B or 1, H or 1, bq, bk)`` as ``(B, Hk, G, bq, bk)``."""
    batch, kv_heads, group, *tile = shape
    return jnp.broadcast_to(bias, (batch, kv_heads * group, *tile)).reshape(shape)


def _masked(scores: Array, seen: Array | None) -> Array:
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


def _product(formula: str, left: Array, right: Array, dtype: Any) -> Array:
    return jnp.einsum(formula, left, right, preferred_element_type=dtype)
