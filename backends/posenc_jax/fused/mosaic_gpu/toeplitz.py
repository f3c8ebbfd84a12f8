"""A bias by distance as tiles for kernels on Hopper GPUs, and its gradient."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from posenc_jax.fused.mosaic_gpu.tile import (
    ROWS,
)


def tiles_of(table: Array) -> Array:
    """``(H, m, n)`` numbers by distance as ``(H, m - 1, n, n)``: rows of queries, columns of keys.

    Element ``(i, j)`` of tile ``t`` is number ``t * n + n - 1 + j - i``: a row is the one before,
    one step further, as it is when numbers repeat with a period one longer than the rows they are
    cut into. Nothing is gathered, and nothing scattered in the gradient.
    """
    heads, count, size = table.shape
    pairs = jnp.concatenate([table[:, :-1], table[:, 1:]], axis=-1)
    repeated = jnp.broadcast_to(pairs[:, :, None], (heads, count - 1, size, 2 * size))
    moved = repeated.reshape(heads, count - 1, -1)[..., : size * (2 * size - 1)]
    return moved.reshape(heads, count - 1, size, 2 * size - 1)[..., size - 1 :]


def tiles_for_queries(table: Array) -> Array:
    """Tiles of as many queries as a warpgroup has, ``(H * m, n, n)``."""
    return tiles_of(table.reshape(table.shape[0], -1, ROWS)).reshape(-1, ROWS, ROWS)


def tiles_for_keys(table: Array) -> Array:
    """Likewise; rows of keys, columns of queries."""
    return jnp.swapaxes(tiles_for_queries(table), 1, 2)
