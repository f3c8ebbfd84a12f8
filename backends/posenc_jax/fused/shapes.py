"""The shape and dtype of an array, typed: JAX ships the class without annotations."""

from __future__ import annotations

from typing import Any

import jax


def array_type(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of an array that does not exist yet."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]  # untyped in JAX
