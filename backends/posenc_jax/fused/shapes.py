"""Shapes of arrays: the type of one, which JAX ships without annotations, and symbolic sizes."""

from __future__ import annotations

from typing import Any

import jax

from posenc.backend import Call


def array_type(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of an array that does not exist yet."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]  # untyped in JAX


def is_symbolic(call: Call) -> bool:
    """Whether a length or the batch is a symbol of ``jax.export``, which has no order."""
    (batch, _, q_len, _), k_len = call.q.shape, call.k.shape[2]
    return not all(isinstance(size, int) for size in (batch, q_len, k_len))
