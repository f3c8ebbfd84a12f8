"""One tile of attention: a block of queries against a block of keys, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from posenc.backend import (
    LogSumExp,
    Tokens,
    bias_tile,
    visible_tokens,
    without_prefix,
)
from posenc_jax.chunked import decay
from posenc_jax.chunked.blocks import Tiling
from posenc_jax.chunked.by_distance import TABLE, tile_of_table
from posenc_jax.tokens import Keys, Queries, float_features
from posenc_jax.trees import Arrays


class Softmax(NamedTuple):
    """An online softmax over the keys so far.

    Attributes
    ----------
    highest
        The highest score of each query.
    total
        The sum of the weights ``exp(score - highest)``.
    values
        The sum of values times weights.
    """

    highest: Array
    total: Array
    values: Array

    @classmethod
    def empty(cls, rows: tuple[int, ...], dim: int, dtype: Any) -> Softmax:
        """The softmax over no keys."""
        lowest = jnp.full(rows, np.finfo(dtype).min, dtype)
        return cls(lowest, jnp.zeros(rows, dtype), jnp.zeros((*rows, dim), dtype))

    def absorb(self, scores: Array, values: Array) -> Softmax:
        """The softmax over one more tile of keys; masked ones score ``-inf`` and get weight 0."""
        # Never below the lowest finite number, because the difference of two infinities is NaN.
        highest = jnp.maximum(self.highest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - highest[..., None])
        shrink = jnp.exp(self.highest - highest)
        # Weights stay unrounded, as in the backward pass, which must have the same output:
        # gradients of a bias are small differences of large sums.
        added = _product("bhgqk,bhkd->bhgqd", weights, values.astype(scores.dtype), scores.dtype)
        return Softmax(
            highest,
            self.total * shrink + jnp.sum(weights, axis=-1),
            self.values * shrink[..., None] + added,
        )

    def result(self) -> tuple[Array, LogSumExp]:
        """The weighted mean of values, 0 for a fully masked row, and the log-sum-exp."""
        lse = LogSumExp.of_weights(self.highest, self.total, jnp)
        return self.values / jnp.where(self.total == 0, 1, self.total)[..., None], lse


def absorb_tile(
    tiling: Tiling,
    before: Array | None,
    softmax: Softmax,
    query: Queries,
    key: Keys,
    learned: Arrays,
    fixed: Arrays,
) -> Softmax:
    """The softmax of a block of queries over one more block of keys."""
    products = _products(query, key, tiling.dtype)
    if before is not None:
        products = decay.products(tiling, before, query, key, learned, fixed)
    scores, _, _ = tile_scores(tiling, products, query, key, learned, fixed)
    return softmax.absorb(scores, key.v)


def _products(query: Queries, key: Keys, dtype: Any) -> Array:
    return _product("bhgqd,bhdk->bhgqk", query.q, key.k, dtype)


def tile_scores(
    tiling: Tiling, scores: Array, query: Queries, key: Keys, learned: Arrays, fixed: Arrays
) -> tuple[Array, Array | None, Any]:
    """Scores of a tile, the derivative of their cap or None, and the VJP function of the bias.

    They begin as products of q and k. Keys are ``(B, Hk, D, bk)`` here, because XLA would transpose
    them in each step of a loop. Scores are ``(B, Hk, G, bq, bk)``, and ``-inf`` where masked. The
    VJP function takes gradients of scores to gradients of learned arrays and of features.

    XLA computes scores twice: for their maximum, and where the maximum is subtracted. There it
    fuses ``product * scale - highest`` into one operation. The highest score less itself is then
    not 0 but the rounding of the product, which ``exp`` cannot hold for scores beyond ``3e9``. A
    ``maximum`` that changes no finite score prevents this. ``where`` does not: XLA moves the
    difference inside of it. Scaling the queries instead would also prevent it, but is slower.
    """
    mask = _visible(tiling, query, key)
    scores = jnp.maximum(scores * tiling.scale, np.finfo(scores.dtype).min)
    d_cap = None
    if tiling.softcap is not None:
        ratio = jnp.tanh(scores / tiling.softcap)
        # The same with "softcap * ratio - highest": none is above the cap.
        scores = jnp.minimum(tiling.softcap * ratio, tiling.softcap)
        d_cap = 1 - ratio * ratio

    def compute_bias(learned: Arrays, query_floats: Arrays, key_floats: Arrays) -> Array | None:
        at = query.side.encoded_pos[..., :, None], key.side.encoded_pos[..., None, :]
        arrays = {**learned, **fixed}
        features = query.side.features | query_floats, key.side.features | key_floats
        bias: Array | None = None
        if tiling.has_table:
            bias = tile_of_table(arrays[TABLE], tiling, query.side, key.side)
        for prefix, term in tiling.by_pair:
            own, of_query, of_key = (without_prefix(a, prefix) for a in (arrays, *features))
            added = bias_tile(
                term, *at, own, query=of_query, key=of_key, dtype=tiling.dtype, xp=jnp
            )
            if added is not None:
                bias = added if bias is None else bias + added
        return None if bias is None else _split_heads(bias, scores.shape)

    bias, bias_vjp = jax.vjp(
        compute_bias, learned, float_features(query.side), float_features(key.side)
    )
    if bias is None:
        return _mask_scores(scores, mask), d_cap, lambda _: bias_vjp(None)
    finite = bias != -jnp.inf
    scores = _mask_scores(scores + bias, finite if mask is None else mask & finite)
    return scores, d_cap, bias_vjp


def tile_gradients(
    tiling: Tiling,
    before: Array | None,
    query: Queries,
    key: Keys,
    learned: Arrays,
    fixed: Arrays,
    turned: tuple[Array, Array],
    rows: tuple[Array, Array, Array],
) -> tuple[Queries, Keys, Arrays]:
    """A tile's part of the gradients of its queries, its keys and the learned arrays.

    ``turned`` are ``turn(key)``. The gradients of k and v are ``(B, Hk, D, bk)``: a CPU takes two
    to three times as long for a product with the transpose of a tile.

    ``rows``, per query: ``d_out``, the log-sum-exp, and ``delta = sum(out * d_out) - d_lse``.
    ``d_out`` and ``delta`` are already multiplied by the correction of weights.
    """
    d_out, lse, delta = rows
    product = partial(_product, dtype=tiling.dtype)
    if before is None:
        products, products_vjp = _products(query, key, tiling.dtype), None
    else:
        products, products_vjp = decay.products_vjp(tiling, before, query, key, learned, fixed)
    scores, d_cap, bias_vjp = tile_scores(tiling, products, query, key, learned, fixed)
    weights = jnp.exp(scores - lse[..., None])
    k, v = turned
    d_out = d_out.astype(v.dtype)
    d_scores = weights * (product("bhgqd,bhdk->bhgqk", d_out, v) - delta[..., None])
    d_learned, d_query_features, d_key_features = bias_vjp(d_scores)
    d_scores = d_scores if d_cap is None else d_scores * d_cap
    d_scores = d_scores * tiling.scale
    if products_vjp is None:
        d_scores = d_scores.astype(k.dtype)
        d_q = product("bhgqk,bhkd->bhgqd", d_scores, k)
        d_k = product("bhgqd,bhgqk->bhdk", query.q, d_scores)
    else:
        d_q, d_k, *more = products_vjp(d_scores)
        d_arrays = d_learned, d_query_features, d_key_features
        d_learned, d_query_features, d_key_features = jax.tree.map(jnp.add, d_arrays, tuple(more))
    d_v = product("bhgqd,bhgqk->bhdk", d_out, weights.astype(d_out.dtype))
    return (
        Queries(d_q, _side_gradients(query.side, d_query_features)),
        Keys(d_k, d_v, _side_gradients(key.side, d_key_features)),
        d_learned,
    )


def turn(key: Keys) -> tuple[Array, Array]:
    """Keys ``(..., bk, D)`` and values ``(..., Dv, bk)`` of a block, for ``tile_gradients``."""
    return jnp.swapaxes(key.k, -1, -2), jnp.swapaxes(key.v, -1, -2)


def _side_gradients(side: Tokens, d_features: Arrays) -> Tokens:
    """Gradients of features, in the structure of a side; None for integers."""
    return Tokens(features={name: d_features.get(name) for name in side.features})


def _visible(tiling: Tiling, query: Queries, key: Keys) -> Array | None:
    """The mask of a tile, ``(B or 1, 1, 1, bq, bk)``; None if every query sees every key."""
    q_seg, k_seg = query.side.seg, key.side.seg
    mask: Array | None = visible_tokens(
        tiling.mask,
        Tokens(query.side.pos[..., :, None], None if q_seg is None else q_seg[..., :, None]),
        Tokens(key.side.pos[..., None, :], None if k_seg is None else k_seg[..., None, :]),
        jnp,
    )
    if key.valid is not None:
        valid = key.valid[..., None, :]
        mask = valid if mask is None else mask & valid
    return None if mask is None else mask[:, :, None]


def _split_heads(bias: Array, shape: tuple[int, ...]) -> Array:
    """``(B or 1, H or 1, bq, bk)`` as ``(B, Hk, G, bq, bk)``."""
    batch, kv_heads, group, *tile = shape
    return jnp.broadcast_to(bias, (batch, kv_heads * group, *tile)).reshape(shape)


def _mask_scores(scores: Array, mask: Array | None) -> Array:
    return scores if mask is None else jnp.where(mask, scores, -jnp.inf)


def _product(formula: str, left: Array, right: Array, dtype: Any) -> Array:
    return jnp.einsum(formula, left, right, preferred_element_type=dtype)
