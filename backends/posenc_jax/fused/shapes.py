"""Shapes of arrays: the type of one, which JAX ships without annotations, and symbolic lengths."""

from __future__ import annotations

from typing import Any

import jax

from posenc.backend import Call


def array_type(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of an array that does not exist yet."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]  # untyped in JAX


def is_symbolic(call: Call) -> bool:
    """Whether a length is a symbol of ``jax.export``, which no condition may compare."""
    return not all(isinstance(array.shape[2], int) for array in (call.q, call.k))
