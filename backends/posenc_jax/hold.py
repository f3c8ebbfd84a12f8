"""How XLA is made to compute the tables of a transform once, and not once per head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_COLUMNS = 32


def hold(table: Array) -> Array:
    """``table (..., n)``, which XLA does not compute within the loops that read it.

    XLA's CPU backend fuses a sine into its consumers, and up to JAX 0.10 it drops an optimization
    barrier before. But it fuses no matrix product, and a product with the identity is exact. A
    number that is not finite makes its neighbours NaN, too.
    """
    if not isinstance(table, jax.core.Tracer):  # operations that are not compiled are not fused
        return table
    if jax.default_backend() != "cpu":
        barrier: Any = lax.optimization_barrier  # untyped in JAX
        held: Array = barrier(table)
        return held
    n = table.shape[-1]
    columns = _COLUMNS if n % _COLUMNS == 0 else n
    blocks = table.reshape(*table.shape[:-1], n // columns, columns)
    identity = jnp.eye(columns, dtype=table.dtype)
    return jnp.matmul(blocks, identity, precision="highest").reshape(table.shape)
