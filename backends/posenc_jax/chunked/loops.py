"""Loops over blocks; one block needs none, and XLA then fuses it with what is around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax

from posenc_jax.chunked.blocks import Index


def loop(bounds: tuple[Index, Index], step: Callable[[Any, Any], Any], start: Any) -> Any:
    """``step(i, carry)`` for ``i`` from the first bound to before the second."""
    if all(isinstance(bound, int) for bound in bounds) and bounds == (0, 1):
        return step(0, start)
    return lax.fori_loop(*bounds, step, start)


def scan(step: Callable[[Any, Any], Any], start: Any, blocks: Any) -> Any:
    """``lax.scan``: a carry, and results stacked."""
    if _count(blocks) > 1:
        return lax.scan(step, start, blocks)
    carry, result = step(start, jax.tree.map(lambda a: a[0], blocks))
    return carry, jax.tree.map(lambda a: a[None], result)


def each(function: Callable[[Any], Any], blocks: Any) -> Any:
    """``lax.map``: results stacked."""
    return scan(lambda _, one: (None, function(one)), None, blocks)[1]


def varying(arrays: Any, like: Any = ()) -> Any:
    """The arrays, varying over every axis of a ``shard_map`` that any of them, or ``like``, does.

    What a loop carries keeps its type, so zeros must vary as what is added to them does. The
    transpose sums over the axes, so that a replicated array gets its whole gradient.
    """
    axes = frozenset[Any]().union(*map(varying_over, jax.tree.leaves((arrays, like))))
    if not axes:
        return arrays
    return jax.tree.map(lambda a: _cast(a, tuple(sorted(axes - varying_over(a)))), arrays)


def varying_over(array: Array) -> frozenset[Any]:
    """The axes of a ``shard_map`` over which an array varies, as far as JAX keeps account."""
    # A JAX that has no such types has no zeros of the wrong one either.
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def _cast(array: Array, axes: tuple[Any, ...]) -> Array:
    return lax.pcast(array, axes, to="varying") if axes else array


def _count(blocks: Any) -> int:
    leaves: list[Array] = jax.tree.leaves(blocks)
    return int(leaves[0].shape[0])
