"""Which blocks of keys each block of queries needs: those it may see that are not negligible."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax

from posenc.backend import Call, negligible_blocks, visible_blocks


def needed_pairs(call: Call, block: int) -> Array:
    """Booleans ``(B or 1, H or 1, nq, nk)`` for pairs of blocks of ``block`` tokens.

    All visible pairs of tokens that are not negligible lie in them.
    """
    call = _stop_gradient(call)
    any_visible, all_visible = visible_blocks(call, block)
    needed: Array = any_visible[:, None]
    if call.skip_blocks:
        negligible = negligible_blocks(call, block, all_visible=all_visible)
        needed = needed if negligible is None else needed & ~negligible
    return needed


def first_and_end(needed: Array) -> Array:
    """First True, and one past the last, along the last axis: ``(2, ...)``; 0 and 0 if none."""
    count = needed.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    end = jnp.max(jnp.where(needed, index + 1, 0), axis=-1)
    first = jnp.min(jnp.where(needed, index, count), axis=-1)
    return jnp.stack([jnp.minimum(first, end), end])


def _stop_gradient(call: Call) -> Call:
    stop = lax.stop_gradient
    return replace(
        call, q=stop(call.q), k=stop(call.k), v=stop(call.v), arrays=stop(dict(call.arrays)),
        query=call.query.map(stop), key=call.key.map(stop),
    )  # fmt: skip
