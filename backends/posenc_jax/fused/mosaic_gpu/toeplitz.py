"""A bias by distance as tiles for kernels on Hopper GPUs; its transpose is the gradient."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from posenc_jax.fused.mosaic_gpu.tile import ROWS
from posenc_jax.fused.plan import Plan


def toeplitz_tiles(table: Array) -> Array:
    """``(H, m, n)`` values by distance as ``(H, m - 1, n, n)``: rows of queries, columns of keys.

    Element ``(i, j)`` of tile ``t`` is value ``t * n + n - 1 + j - i``. Repeating a vector of
    length ``2n`` with row length ``2n - 1`` shifts each row by one. So nothing is gathered, and the
    gradient scatters nothing.
    """
    heads, count, size = table.shape
    pairs = jnp.concatenate([table[:, :-1], table[:, 1:]], axis=-1)
    repeated = jnp.broadcast_to(pairs[:, :, None], (heads, count - 1, size, 2 * size))
    shifted = repeated.reshape(heads, count - 1, -1)[..., : size * (2 * size - 1)]
    return shifted.reshape(heads, count - 1, size, 2 * size - 1)[..., size - 1 :]


def first_table_tile(plan: Plan) -> int:
    """The diagonal of the first tile; tile ``a`` of queries and ``b`` of keys lie on ``b - a``."""
    return (plan.near[0] - 1) * (plan.block // ROWS) + 1


def tiles_for_queries(table: Array) -> Array:
    """Tiles with the queries of a warpgroup as rows, ``(H * m, n, n)``."""
    return toeplitz_tiles(table.reshape(table.shape[0], -1, ROWS)).reshape(-1, ROWS, ROWS)


def tiles_for_keys(table: Array) -> Array:
    """Tiles with keys as rows and queries as columns."""
    return jnp.swapaxes(tiles_for_queries(table), 1, 2)
