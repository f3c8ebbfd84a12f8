"""Trees of arrays: their gradients, and the axes of a ``shard_map`` over which they vary."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

T = TypeVar("T")
Arrays: TypeAlias = dict[str, Array]


def is_float(array: Array) -> bool:
    """Whether an array has gradients."""
    return bool(jnp.isdtype(array.dtype, "real floating"))


def zero_gradients(arrays: Any, dtype: Any) -> Any:
    """Zeros to sum gradients of arrays in; None for integers, which have no gradient."""
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, dtype) if is_float(a) else None, arrays)
    return make_varying(zeros, arrays)


def gradients_as(arrays: Any, gradients: Any) -> Any:
    """Gradients in the dtypes of their arrays."""
    return jax.tree.map(
        lambda g, a: None if g is None else g.astype(a.dtype),
        gradients,
        arrays,
        is_leaf=lambda g: g is None,
    )


def make_varying(arrays: T, like: Any = ()) -> T:
    """The arrays, varying over every axis of a ``shard_map`` that any of them, or ``like``, does.

    A loop keeps the types of what it carries, so zeros must vary as the terms added to them do. The
    transpose sums over the axes, so that a replicated array gets its whole gradient.
    """
    axes = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves((arrays, like))))
    if not axes:
        return arrays
    varying: T = jax.tree.map(lambda a: _cast(a, tuple(sorted(axes - varying_axes(a)))), arrays)
    return varying


def varying_axes(array: Array) -> frozenset[Any]:
    """The axes of a ``shard_map`` over which an array varies, as far as JAX tracks them."""
    # A JAX without such types accepts zeros of any type.
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def _cast(array: Array, axes: tuple[Any, ...]) -> Array:
    return lax.pcast(array, axes, to="varying") if axes else array
