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
        return jnp.clip(self.first + n * width, 0, last)

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
    jobs = jnp.arange(first.size)
    if lanes > 1:
        jobs = jnp.argsort(first - end, stable=True)  # the longest first
    jobs = jobs.astype(first.dtype)  # an index in several axes has one dtype
    groups = [  # the last one is filled with jobs that need nothing
        jnp.pad(a, (0, -first.size % lanes)).reshape(-1, lanes)
        for a in (jobs // blocks, jobs % blocks, first[jobs], (end - first)[jobs])
    ]
    return Jobs(Group(*groups), jnp.argsort(jobs).reshape(heads, blocks))


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
    return jax.tree.map(lambda a: _get(a, (head * a.shape[0] // heads,)), arrays)


def get_blocks(tree: Any, axes: Any, head: Array, block: Array, width: int, *, heads: int) -> Any:
    """Blocks ``block .. block + width - 1`` of the head in each lane, joined along ``axes``."""

    def get(axis: int, array: Array) -> Array:
        at = head * array.shape[0] // heads
        return jnp.concatenate([_get(array, (at, block + n)) for n in range(width)], axis)

    return _map_axes(get, axes, tree)


def add_arrays(sums: Any, added: Any, head: Array, *, heads: int) -> Any:
    """``sums``, with what each lane adds to the arrays of its head."""
    return jax.tree.map(lambda a, b: _add(a, b, (head * a.shape[0] // heads,)), sums, added)


def add_blocks(
    sums: Any, added: Any, axes: Any, head: Array, block: Array, width: int, *, heads: int
) -> Any:
    """``sums``, with what each lane adds to blocks ``block .. block + width - 1`` of its head."""

    def add(axis: int, array: Array, added: Array) -> Array:
        at = head * array.shape[0] // heads
        for n, part in enumerate(jnp.split(added, width, axis)):
            array = _add(array, part, (at, block + n))
        return array

    return _map_axes(add, axes, sums, added)


def _map_axes(function: Callable[..., Array], axes: Any, *trees: Any) -> Any:
    """``jax.tree.map``, with an axis of tokens for each array or for all arrays of a subtree."""
    return jax.tree.map(
        lambda axis, *parts: jax.tree.map(partial(function, axis), *parts), axes, *trees
    )


def _get(array: Array, index: tuple[Array, ...]) -> Array:
    if index[0].size > 1:
        return array.at[index].get(mode="clip")
    return array[tuple(n[0] for n in index)][None]


def _add(array: Array, added: Array, index: tuple[Array, ...]) -> Array:
    if index[0].size > 1:
        return array.at[index].add(added)
    start = [n[0] for n in index]
    start += [jnp.zeros_like(start[0])] * (array.ndim - len(index))
    before = lax.dynamic_slice(array, start, (*[1] * len(index), *array.shape[len(index) :]))
    return lax.dynamic_update_slice(array, before + added.reshape(before.shape), start)
