"""Heads one after the other, so that each loops over its own range of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import PositionScheme
from posenc_jax.chunked.loops import map_blocks


def map_heads(attend: Callable[..., Any], operands: tuple[Any, ...], scheme: PositionScheme) -> Any:
    """``attend(*operands)`` of one query head at a time, as if of all: heads are axis 2 of results.

    ``operands`` are queries, keys, learned and fixed arrays, and ranges. Each call gets all of
    them with one head. Query heads that share keys are an inner loop, so keys are not repeated, and
    JAX adds up their gradients.
    """
    queries, keys, learned, fixed, ranges = operands
    heads, kv_heads = queries.q.shape[2], keys.k.shape[2]
    specs = scheme.param_specs()
    axes = (
        *jax.tree.map(lambda _: 2, (queries, keys)),
        {name: 0 if specs[name].per_head else -1 for name in learned},
        dict.fromkeys(fixed, 0),  # constants, one number per head
        jax.tree.map(lambda _: 2, ranges),
    )
    leaves, structure = jax.tree.flatten(operands)
    of_queries: dict[int, Array] = {}
    of_keys: dict[int, Array] = {}
    shared: dict[int, Array] = {}
    for n, (array, axis) in enumerate(zip(leaves, jax.tree.leaves(axes), strict=True)):
        count = 0 if axis < 0 else array.shape[axis]
        if count == heads:
            by_head = _first(array, axis)
            of_queries[n] = by_head.reshape(kv_heads, -1, *by_head.shape[1:])
        elif count == kv_heads:
            of_keys[n] = _first(array, axis)
        else:
            shared[n] = array

    def attend_group(group: tuple[dict[int, Array], dict[int, Array]]) -> Any:
        of_queries, of_key = group

        def attend_head(of_query: dict[int, Array]) -> Any:
            by_index = {**shared, **of_key, **of_query}
            return attend(*jax.tree.unflatten(structure, [by_index[n] for n in range(len(leaves))]))

        return map_blocks(attend_head, of_queries)

    results = map_blocks(attend_group, (of_queries, of_keys))
    # (Hk, G, n, B, 1, ...)
    return jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(heads, *a.shape[2:4], *a.shape[5:]), 0, 2), results
    )


def _first(array: Array, axis: int) -> Array:
    """The axis first, with an axis of one head in its place."""
    return jnp.expand_dims(jnp.moveaxis(array, axis, 0), axis + 1)
