"""A table by distance at all pairs of consecutive positions, as one program for XLA.

``unfold`` is for a whole array of pairs, ``slices`` for a tile. Their values have the same bits.
They differ in the gradient, which adds rows up to one table. JAX transposes ``slices`` to a scatter
of rows. XLA's CPU backend takes seven times as long for that as a loop over the rows of an array,
and as long for a tile.

``unfold`` and its transpose, ``fold``, are two linear operations. So both have derivatives of any
order, forward and reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def unfold(table: Array, rows: int) -> Array:
    """``(..., rows, N - rows + 1)`` from ``(..., N)``, with a fast gradient on a CPU.

    Without jit, and on a mesh, it is ``slices``: JAX's own operations know how arrays are sharded.
    """
    if jax.config.jax_disable_jit or not jax.typeof(table).sharding.mesh.empty:  # type: ignore[attr-defined]
        sliced: Array = slices(table, rows=rows)
        return sliced
    unfolded: Array = _unfold.bind(table, rows=rows)
    return unfolded


@partial(jax.jit, static_argnames="rows")
def slices(table: Array, *, rows: int) -> Array:
    """``(..., rows, N - rows + 1)`` from ``(..., N)``: each row is a slice of the table.

    XLA copies slices row by row. An index per pair would gather number by number.
    """
    columns = table.shape[-1] - rows + 1

    def row(first: Array) -> Array:
        return lax.dynamic_slice_in_dim(table, first, columns, axis=-1)

    return jax.vmap(row, out_axes=-2)(jnp.arange(rows - 1, -1, -1))


def _scattered(unfolded: Array, *, rows: int) -> Array:
    """``fold`` as JAX transposes ``unfold``: a scatter of rows."""
    distances = unfolded.shape[-1] + rows - 1
    table = jnp.zeros((*unfolded.shape[:-2], distances), unfolded.dtype)
    folded: Array = jax.linear_transpose(partial(slices, rows=rows), table)(unfolded)[0]
    return folded


def _added(unfolded: Array, *, rows: int) -> Array:
    """``fold`` row after row, in place: fast on a CPU. A GPU would start kernels for each row."""
    columns = unfolded.shape[-1]

    def add(i: Any, table: Array) -> Array:
        row = lax.dynamic_index_in_dim(unfolded, i, axis=-2, keepdims=False)
        before = lax.dynamic_slice_in_dim(table, rows - 1 - i, columns, axis=-1)
        return lax.dynamic_update_slice_in_dim(table, before + row, rows - 1 - i, axis=-1)

    first = jnp.pad(unfolded[..., 0, :], [(0, 0)] * (unfolded.ndim - 2) + [(rows - 1, 0)])
    folded: Array = lax.fori_loop(1, rows, add, first)
    return folded


def _linear(name: str, shape: Callable[..., tuple[int, ...]], compute: Callable[..., Array]) -> Any:
    """A linear operation on the last axes of an array."""
    operation: Any = Primitive(name)  # Any: JAX has no types for it
    operation.def_impl(jax.jit(operation.bind, static_argnames="rows"))
    operation.def_abstract_eval(lambda a, *, rows: a.update(shape=shape(a.shape, rows)))

    def batch(arrays: Any, axes: Any, *, rows: int) -> tuple[Any, int]:
        return operation.bind(jnp.moveaxis(arrays[0], axes[0], 0), rows=rows), 0

    batching.primitive_batchers[operation] = batch
    mlir.register_lowering(operation, mlir.lower_fun(compute, multiple_results=False))
    return operation


_unfold = _linear("posenc_unfold", lambda s, rows: (*s[:-1], rows, s[-1] - rows + 1), slices)
_fold = _linear("posenc_fold", lambda s, rows: (*s[:-2], s[-1] + rows - 1), _scattered)
mlir.register_lowering(_fold, mlir.lower_fun(_added, multiple_results=False), platform="cpu")
ad.deflinear2(_unfold, lambda gradient, _, *, rows: [_fold.bind(gradient, rows=rows)])  # type: ignore[no-untyped-call] # untyped in JAX
ad.deflinear2(_fold, lambda gradient, _, *, rows: [_unfold.bind(gradient, rows=rows)])  # type: ignore[no-untyped-call]
with suppress(ImportError):  # experimental: without it, nothing has Taylor series
    from jax.experimental import jet

    for _operation in (_unfold, _fold):
        jet.deflinear(_operation)  # type: ignore[no-untyped-call]
