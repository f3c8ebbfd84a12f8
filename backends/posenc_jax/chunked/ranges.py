"""Which blocks each head of a call needs, where far keys may be negligible."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import Call, Side
from posenc_jax.chunked.blocks import Tiling
from posenc_jax.needed import first_and_end, needed_pairs
from posenc_jax.trees import Arrays


class Ranges(NamedTuple):
    """The first block that is needed, and one past the last: of keys, and of queries.

    ``keys`` is ``(nq, 2, H or 1)``, for each block of queries; ``queries`` is ``(nk, 2, H or 1)``,
    for each block of keys.
    """

    keys: Array
    queries: Array


def needed_ranges(
    tiling: Tiling, q: Array, k: Array, v: Array, query: Side, key: Side, arrays: Arrays
) -> Ranges:
    """The ranges of a call, over its whole batch."""
    call = Call(
        scheme=tiling.scheme, xp=jnp, dtype=tiling.dtype, q=q, k=k, v=v, arrays=arrays,
        query=query, key=key, aligned=tiling.aligned, causal=tiling.causal, window=tiling.window,
        sink_tokens=tiling.sink_tokens, scale=tiling.scale,
    )  # fmt: skip
    needed = _any_of_batch(needed_pairs(call, tiling.k_block))
    by_key_block = jnp.swapaxes(needed, 1, 2)
    return Ranges(*(first_and_end(pairs).transpose(2, 0, 1) for pairs in (needed, by_key_block)))


@jax.custom_batching.custom_vmap
def _any_of_batch(needed: Array) -> Array:
    """Whether any sequence needs a pair of blocks; of all calls under ``vmap`` too.

    A loop whose bounds differ within ``vmap`` copies what it carries in every step, to leave it as
    it is where a shorter loop has ended. In the backward pass that is the gradient of all queries.
    """
    return jnp.any(needed, axis=0)


@_any_of_batch.def_vmap
def _(_: int, __: list[bool], needed: Array) -> tuple[Array, bool]:
    return _any_of_batch(jnp.any(needed, axis=0)), False
