"""Which blocks each block of a call needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import Call, Tokens, block_ranges, visible_between
from posenc_jax.chunked.blocks import Index, Tiling
from posenc_jax.needed import first_and_end, needed_pairs
from posenc_jax.trees import Arrays


class Ranges(NamedTuple):
    """The first block that is needed, and one past the last: of keys, and of queries.

    ``keys`` is ``(2, heads, nq)``, for each block of queries; ``queries`` is ``(2, heads, nk)``,
    for each block of keys. Heads are separate ones, as in ``Tiling``.
    """

    keys: Array
    queries: Array


def visible_ranges(tiling: Tiling, query: Tokens, key: Tokens) -> Ranges:
    """The ranges that hold all visible pairs; separate heads have the same."""
    if tiling.mask.parts and max(tiling.q_block_count, tiling.k_block_count) > 1:
        return _ranges_of_blocks(tiling, query, key)

    def stacked(bounds: tuple[Index, Index], blocks: int) -> Array:
        shape = tiling.heads, blocks
        return jnp.stack([jnp.broadcast_to(jnp.asarray(bound), shape) for bound in bounds])

    nq, nk = tiling.q_block_count, tiling.k_block_count
    return Ranges(
        stacked(tiling.key_blocks(jnp.arange(nq)), nq),
        stacked(tiling.query_blocks(jnp.arange(nk)), nk),
    )


def _ranges_of_blocks(tiling: Tiling, query: Tokens, key: Tokens) -> Ranges:
    """``visible_ranges`` where a further mask tells which blocks it shows."""

    def ranges(values: Array | None, size: int) -> Any:
        return None if values is None else block_ranges(values, size, jnp)

    seen, _ = visible_between(
        tiling.mask, ranges(query.pos, tiling.q_block), ranges(key.pos, tiling.k_block),
        ranges(query.seg, tiling.q_block), ranges(key.seg, tiling.k_block),
    )  # fmt: skip
    seen = jnp.broadcast_to(_any_of_batch(seen[:, None]), (tiling.heads, *seen.shape[1:]))
    return Ranges(*(first_and_end(pairs) for pairs in (seen, jnp.swapaxes(seen, 1, 2))))


def needed_ranges(
    tiling: Tiling, q: Array, k: Array, v: Array, query: Tokens, key: Tokens, arrays: Arrays
) -> Ranges:
    """The ranges that hold all pairs that are not negligible, over the whole batch."""
    call = Call(
        scheme=tiling.scheme, xp=jnp, dtype=tiling.dtype, q=q, k=k, v=v, arrays=arrays,
        query=query, key=key, aligned=tiling.aligned, mask=tiling.mask, scale=tiling.scale,
    )  # fmt: skip
    needed = _any_of_batch(needed_pairs(call, tiling.k_block))
    needed = jnp.broadcast_to(needed, (tiling.heads, *needed.shape[1:]))
    return Ranges(*(first_and_end(pairs) for pairs in (needed, jnp.swapaxes(needed, 1, 2))))


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
