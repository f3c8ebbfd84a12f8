"""Whether a bias has so many operations that a table by distance is cheaper."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import Call, bias_tile, has_bias_by_distance

_MANY = 100  # per pair of positions


def is_cheaper_by_distance(call: Call) -> bool:
    """Whether the bias depends on distance alone and has many operations, as 64 cosines have."""
    if not has_bias_by_distance(call):
        return False

    def bias(at: Array) -> Array | None:
        value: Array | None = bias_tile(call.scheme, at, at, call.arrays, dtype=call.dtype, xp=jnp)
        return value

    return len(jax.make_jaxpr(bias)(jnp.zeros((1, 1, 1, 1), jnp.int32)).jaxpr.eqns) > _MANY
