"""A table by distance at all pairs of consecutive positions, as one program for XLA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax


@partial(jax.jit, static_argnums=1)
def unfold(table: Array, rows: int) -> Array:
    """``(..., rows, N - rows + 1)`` from ``(..., N)``: each row is a slice of the table.

    XLA copies slices row by row, and adds their gradients likewise. An index per pair would scatter
    the gradient number by number.
    """
    columns = table.shape[-1] - rows + 1

    def row(first: Array) -> Array:
        return lax.dynamic_slice_in_dim(table, first, columns, axis=-1)

    return jax.vmap(row, out_axes=-2)(jnp.arange(rows - 1, -1, -1))
