"""One tile of attention: a block of queries against a block of keys, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from posenc.evaluate import bias_tile
from posenc.positions import visible
from posenc.protocol import PositionScheme
from posenc_jax.blocks import Tiling

Arrays: TypeAlias = dict[str, Array]


class Queries(NamedTuple):
    """A block of queries: ``vectors (B, Hk, G, bq, D)``; the others ``(B or 1, H or 1, bq)``.

    ``coords`` are the coordinates of a gated scheme. In gradients, what has none is None.
    """

    vectors: Array
    pos: Array | None
    seg: Array | None
    coords: Array | None


class Keys(NamedTuple):
    """A block of keys: ``vectors (B, Hk, bk, D)``, ``values (B, Hk, bk, Dv)``, as in ``Queries``.

    ``real`` is False at padding; None if there is none.
    """

    vectors: Array
    values: Array
    pos: Array | None
    seg: Array | None
    coords: Array | None
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
) -> tuple[Array, Any]:
    """Scores ``(B, Hk, G, bq, bk)``, ``-inf`` where hidden, and the transpose of the bias.

    The transpose takes gradients of scores to those of learned arrays and of coordinates.

    XLA computes scores where the highest is found, and again where it is taken off. There it makes
    one operation of ``product * scale - highest``, so that the highest less itself is not 0 but the
    rounding of the product: for scores beyond ``3e9`` that is more than ``exp`` can hold. So a
    maximum follows, which changes no finite score. A choice would not do: XLA takes the difference
    inside of it. Scaled queries would, but are slower.
    """
    scores = _product("bhgqd,bhkd->bhgqk", query.vectors, key.vectors, tiling.dtype)
    seen = _visible(tiling, query, key)
    scores = jnp.maximum(scores * tiling.scale, jnp.finfo(scores.dtype).min)

    def bias_of(learned: Arrays, q_coords: Array | None, k_coords: Array | None) -> Array | None:
        q, k = (query.pos, key.pos) if q_coords is None else (q_coords, k_coords)
        at = q[..., :, None], k[..., None, :]
        by_distance = tiling.by_distance and q_coords is None
        tile = _toeplitz if by_distance else bias_tile
        bias = tile(tiling.scheme, *at, {**learned, **fixed}, dtype=tiling.dtype, xp=jnp)
        return None if bias is None else _grouped(bias, scores.shape)

    bias, transpose = jax.vjp(bias_of, learned, query.coords, key.coords)
    if bias is None:
        return _masked(scores, seen), lambda _: transpose(None)
    finite = bias != -jnp.inf
    return _masked(scores + bias, finite if seen is None else seen & finite), transpose


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
    scores, transpose_bias = scored(tiling, query, key, learned, fixed)
    weights = jnp.exp(scores - logsumexp[..., None])
    d_out = d_out.astype(key.values.dtype)
    d_scores = weights * (product("bhgqd,bhkd->bhgqk", d_out, key.values) - delta[..., None])
    d_learned, d_q_coords, d_k_coords = transpose_bias(d_scores)
    d_scores = (d_scores * tiling.scale).astype(key.vectors.dtype)
    d_query = product("bhgqk,bhkd->bhgqd", d_scores, key.vectors)
    d_key = product("bhgqk,bhgqd->bhkd", d_scores, query.vectors)
    d_value = product("bhgqk,bhgqd->bhkd", weights.astype(d_out.dtype), d_out)
    return (
        Queries(d_query, None, None, d_q_coords),
        Keys(d_key, d_value, None, None, d_k_coords, None),
        d_learned,
    )


def _visible(tiling: Tiling, query: Queries, key: Keys) -> Array | None:
    """Which query sees which key, ``(B or 1, 1, 1, bq, bk)``; None if each sees all."""
    q_seg = k_seg = None
    if query.seg is not None:
        q_seg, k_seg = query.seg[..., :, None], key.seg[..., None, :]
    at = query.pos[..., :, None], key.pos[..., None, :]
    seen = visible(*at, q_seg, k_seg, causal=tiling.causal, window=tiling.window)
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
