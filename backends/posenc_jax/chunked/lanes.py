"""Lanes: tiles of several heads or blocks side by side, as one batch.

On a CPU, one tile of one head is too little work for several threads. So where heads need different
ranges of blocks, each step of a loop computes one tile in each of several lanes. A job is a block
of one head, with the range of blocks that it needs. Jobs with ranges of about the same length go
together: a lane whose range has ended waits for the others.

Where all heads need the same range, a job has all of them, and there is one lane.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc_jax.chunked.blocks import Index
from posenc_jax.trees import Arrays


class Group(NamedTuple):
    """Jobs side by side, one in each lane; all arrays are ``(lanes,)``.

    Attributes
    ----------
    head, block
        A head and one of its blocks; the head is 0 where a job has all heads.
    first, needed
        The first block of the other side that a job needs, and how many.
    """

    head: Array
    block: Array
    first: Array
    needed: Array

    def bounds(self, blocks: int, width: int) -> tuple[Index, Index]:
        """Bounds of a loop over the longest range; ``width`` of at most ``blocks`` in a step."""
        return 0, 1 if blocks == 1 else -(-jnp.max(self.needed) // width)

    def next(self, n: Index, width: int) -> Array:
        """The first block of step ``n`` in each range; one that is read again after its end."""
        last = jnp.maximum(self.first + self.needed - 1, 0)
        return jnp.minimum(self.first + n * width, last)

    def keep(self, n: Index, width: int, arrays: Any, otherwise: Any = None) -> Any:
        """The arrays in lanes whose range has a step ``n``; ``otherwise``, or 0, in the others."""
        if self.needed.size == 1:  # the loop ends with the range
            return arrays

        def choose(array: Array, other: Array | float) -> Array:
            has_step = lax.expand_dims(n * width < self.needed, range(1, array.ndim))
            return jnp.where(has_step, array, other)

        if otherwise is None:
            return jax.tree.map(lambda a: choose(a, 0), arrays)
        return jax.tree.map(choose, arrays, otherwise)


class Jobs(NamedTuple):
    """All jobs, in groups.

    Attributes
    ----------
    groups
        Each array is ``(groups, lanes)``.
    order
        Where each job is in them, ``(heads, blocks)``.
    """

    groups: Group
    order: Array

    def join(self, results: Any) -> Any:
        """Results ``(groups, lanes, ...)`` as ``(heads, blocks, ...)``."""

        def join(array: Array) -> Array:
            _, lanes, *rest = array.shape
            array = array.reshape(-1, *rest)
            return array[self.order] if lanes > 1 else array.reshape(*self.order.shape, *rest)

        return jax.tree.map(join, results)


def make_jobs(ranges: Array, lanes: int) -> Jobs:
    """Jobs of ranges ``(2, heads, blocks)``: the first block that is needed, one past the last."""
    heads, blocks = ranges.shape[1:]
    first, end = ranges.reshape(2, -1)
    lanes = min(lanes, first.size)
    jobs = jnp.arange(first.size, dtype=first.dtype)
    table = jnp.stack([jobs // blocks, jobs % blocks, first, end - first], axis=1)
    if lanes > 1:  # the longest first
        jobs = jnp.argsort(first - end, stable=True)
        table = _get(table, jobs)
    # The last group is filled with jobs that need nothing.
    table = jnp.pad(table, ((0, -first.size % lanes), (0, 0))).reshape(-1, lanes, 4)
    return Jobs(Group(*jnp.moveaxis(table, -1, 0)), jnp.argsort(jobs).reshape(heads, blocks))


def separate_heads(tree: Any, *, separate: bool) -> Any:
    """``(n, B or 1, c, ...)`` as ``(c, n, B or 1, 1, ...)``, or as ``(1, n, B or 1, c, ...)``."""

    def split(array: Array) -> Array:
        return jnp.moveaxis(array[:, :, None], 3, 0) if separate else array[None]

    return jax.tree.map(split, tree)


def join_heads(array: Array) -> Array:
    """The inverse of ``separate_heads``, for an array of all heads."""
    heads, n, batch, together, *rest = array.shape
    return jnp.moveaxis(array, 0, 2).reshape(n, batch, heads * together, *rest)


def separate_params(arrays: Arrays, shared: frozenset[str], heads: int) -> Arrays:
    """``(H, ...)`` as ``(H, 1, ...)`` if ``heads > 1`` are separate; all others ``(1, ...)``.

    ``shared`` are the names of arrays that have no axis of heads.
    """
    return {
        name: a[:, None] if heads > 1 and len(a) == heads and name not in shared else a[None]
        for name, a in arrays.items()
    }


def get_arrays(arrays: Any, head: Array, *, heads: int) -> Any:
    """The arrays of the head in each lane: lanes are the first axis.

    ``heads`` is the number of separate heads. An array of fewer heads serves equally many of them
    with each.
    """
    return jax.tree.map(lambda a: _get(a, _head_of(a, head, heads)), arrays)


def get_blocks(tree: Any, axes: Any, head: Array, block: Array, width: int, *, heads: int) -> Any:
    """Blocks ``block .. block + width - 1`` of the head in each lane, joined along ``axes``."""

    def get(axis: int, array: Array) -> Array:
        blocks = jnp.moveaxis(_get(array, _head_of(array, head, heads), block, width), 1, axis)
        return blocks.reshape(*blocks.shape[:axis], -1, *blocks.shape[axis + 2 :])

    return _map_axes(get, axes, tree)


def add_arrays(sums: Any, added: Any, head: Array, *, heads: int) -> Any:
    """``sums``, with what each lane adds to the arrays of its head."""
    return jax.tree.map(lambda a, b: _add(a, b, _head_of(a, head, heads)), sums, added)


def add_blocks(
    sums: Any, added: Any, axes: Any, head: Array, block: Array, width: int, *, heads: int
) -> Any:
    """``sums``, with what each lane adds to blocks ``block .. block + width - 1`` of its head."""

    def add(axis: int, array: Array, added: Array) -> Array:
        blocks = added.reshape(*added.shape[:axis], width, -1, *added.shape[axis + 1 :])
        return _add(array, jnp.moveaxis(blocks, axis, 1), _head_of(array, head, heads), block)

    return _map_axes(add, axes, sums, added)


def _map_axes(function: Callable[..., Array], axes: Any, *trees: Any) -> Any:
    """``jax.tree.map``, with an axis of tokens for each array or for all arrays of a subtree."""
    return jax.tree.map(
        lambda axis, *parts: jax.tree.map(partial(function, axis), *parts), axes, *trees
    )


def _head_of(array: Array, head: Array, heads: int) -> Array:
    """Where the array of each lane's head is, of ``heads`` that share the first axis."""
    if array.shape[0] == heads:
        return head
    if array.shape[0] == 1:
        return jnp.zeros_like(head)
    return lax.div(head, jnp.full_like(head, heads // array.shape[0]))


# XLA's operations, not NumPy's indices: those also serve indices that are negative or too large,
# which there are none of. A model compiles these for every layer, and it takes twice as long.


def _get(array: Array, head: Array, block: Array | None = None, width: int = 1) -> Array:
    """``(lanes, ...)`` of each head; with ``block``, that many blocks ``(lanes, width, ...)``."""
    index = [head] if block is None else [head, block]
    sizes = (1, *array.shape[1:]) if block is None else (1, width, *array.shape[2:])
    if head.size == 1:
        return lax.dynamic_slice(array, _start(array, index), sizes, allow_negative_indices=False)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, array.ndim)),
        collapsed_slice_dims=(0,),
        start_index_map=tuple(range(len(index))),
    )
    in_bounds = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(array, jnp.stack(index, -1), numbers, sizes, mode=in_bounds)


def _add(array: Array, added: Array, head: Array, block: Array | None = None) -> Array:
    """``array``, with ``added`` where ``_get`` reads; lanes may add to the same place."""
    index = [head] if block is None else [head, block]
    if head.size == 1:
        start = _start(array, index)
        before = lax.dynamic_slice(array, start, added.shape, allow_negative_indices=False)
        return lax.dynamic_update_slice(array, before + added, start, allow_negative_indices=False)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, array.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=tuple(range(len(index))),
    )
    in_bounds = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.scatter_add(array, jnp.stack(index, -1), added, numbers, mode=in_bounds)


def _start(array: Array, index: list[Array]) -> list[Array]:
    """The index of the only lane, for slices that hold all of the other axes."""
    first = [n[0] for n in index]
    return first + [jnp.zeros_like(first[0])] * (array.ndim - len(index))
