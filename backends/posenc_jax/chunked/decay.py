"""Products of a tile whose channels decay, and their gradients.

A tile whose keys lie before all of its queries is one product of anchored queries and keys; keys of
another tile are sorted (``posenc/attn/channel_decay.py``). One condition decides for all lanes,
because under ``vmap`` a condition of each lane would compute both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc.backend import ChannelDecay, Tokens, has_channel_decay
from posenc_jax.chunked.blocks import Tiling
from posenc_jax.tokens import Keys, Queries, float_features
from posenc_jax.trees import Arrays


def lies_before(tiling: Tiling, query: Queries, key: Keys) -> Array | None:
    """Whether tiles can be anchored, in all lanes; None if no channel decays."""
    if not has_channel_decay(tiling.scheme):
        return None

    def of_lane(query: Tokens, key: Tokens) -> Array:
        decay = ChannelDecay(tiling.scheme, jnp, tiling.dtype, {}, query, key)
        return jnp.all(decay.lies_before())

    sides = (Tokens(side.pos, side.seg) for side in (query.side, key.side))
    return jnp.all(jax.vmap(of_lane)(*sides))


def products(
    tiling: Tiling, before: Array, query: Queries, key: Keys, learned: Arrays, fixed: Arrays
) -> Array:
    """``(B, Hk, G, bq, bk)``, unscaled, from keys ``(B, Hk, D, bk)``."""
    return _products(tiling, before, query, key, fixed, *_of(query, key, learned))


def products_vjp(
    tiling: Tiling, before: Array, query: Queries, key: Keys, learned: Arrays, fixed: Arrays
) -> tuple[Array, Callable[[Array], Any]]:
    """The products, and from their gradient those of q, k, learned arrays and features."""
    compute = partial(_products, tiling, before, query, key, fixed)
    found, vjp = jax.vjp(compute, *_of(query, key, learned))
    return found, vjp


def _of(query: Queries, key: Keys, learned: Arrays) -> tuple[Array, Array, Arrays, Arrays, Arrays]:
    """What has gradients."""
    return query.q, key.k, learned, float_features(query.side), float_features(key.side)


def _products(
    tiling: Tiling, before: Array, query: Queries, key: Keys, fixed: Arrays,
    q: Array, k: Array, learned: Arrays, q_features: Arrays, k_features: Arrays,
) -> Array:  # fmt: skip
    batch, kv_heads, group, q_len, dim = q.shape
    decay = ChannelDecay(
        tiling.scheme, jnp, tiling.dtype, {**learned, **fixed},
        Tokens(query.side.pos, query.side.seg, features=q_features),
        Tokens(key.side.pos, key.side.seg, features=k_features),
    )  # fmt: skip
    q = q.astype(tiling.dtype).reshape(batch, kv_heads * group, q_len, dim)
    k = jnp.repeat(jnp.swapaxes(k, 2, 3).astype(tiling.dtype), group, axis=1)

    # Both would keep what the other needs for a gradient.
    @jax.checkpoint
    def anchored(q: Array, k: Array) -> Array:
        q, k = decay.anchored(q, k)
        return _product(q, k)

    @jax.checkpoint
    def sorted_keys(q: Array, k: Array) -> Array:
        scores: Array = decay.apply(_product(q, k), q, k)
        return scores

    found: Array = lax.cond(before, anchored, sorted_keys, q, k)
    return found.reshape(batch, kv_heads, group, q_len, -1)


def _product(q: Array, k: Array) -> Array:
    return jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=q.dtype)
