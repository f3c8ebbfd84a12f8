"""Attention of a scheme that adjusts whole rows of scores: some queries at a time.

Memory is ``O(H L)``. The backward pass computes each block again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc.backend import Call, LogSumExp, Tokens, dense, of_queries, queries_of
from posenc_jax.chunked.blocks import join_blocks, most_queries, split_blocks
from posenc_jax.chunked.loops import map_blocks
from posenc_jax.trees import make_varying

_SCORES, _ON_A_DEVICE = 2**19, 2**24  # at a time; on a CPU they stay in a cache
_RANGES, _BLOCKS = 4, 4  # of queries, at most; and how many blocks each has at least


def by_rows(call: Call) -> tuple[Array, LogSumExp]:
    """``(B, H, Q, Dv)`` and its log-sum-exp, in the working dtype."""
    # Here, so that the gradients of keys are summed over blocks in it.
    q, k, v = (array.astype(call.dtype) for array in (call.q, call.k, call.v))
    call = replace(call, q=q, k=k, v=v)
    scores = _SCORES if jax.default_backend() == "cpu" else _ON_A_DEVICE
    size = queries_of(call, scores, most=most_queries())
    if size == q.shape[2]:
        return _definition(call)
    ranges = [of_queries(call, queries) for queries in _ranges(call, size)]
    found = [_by_blocks(part, queries_of(part, scores, most=most_queries())) for part in ranges]
    joined: tuple[Array, LogSumExp] = jax.tree.map(lambda *parts: jnp.concat(parts, axis=2), *found)
    return joined


def _ranges(call: Call, size: int) -> list[slice]:
    """Queries that leave out the same keys, under a causal mask or a window.

    Under a causal mask ``n`` ranges have ``(n + 1) / (2 n)`` of all scores. Each is compiled by
    itself.
    """
    q_len, count = call.q.shape[2], 1
    if call.offsets != (None, None):
        count = max(1, min(_RANGES, q_len // (_BLOCKS * size)))
    width = -(-q_len // count)
    return [slice(start, min(start + width, q_len)) for start in range(0, q_len, width)]


def _by_blocks(call: Call, size: int) -> tuple[Array, LogSumExp]:
    if size == call.q.shape[2]:
        return _definition(call)
    # What decides the program, and may be compared: so that it is compiled once.
    none: Any = None
    static = replace(
        call, q=none, k=none, v=none, arrays=none, query=none, key=none, extra_bias=None,
        sink=None, regions=(), shared=None, mask=replace(call.mask, array=None), aligned=False,
    )  # fmt: skip
    sides = (
        (call.q, call.query, call.mask.array, call.extra_bias), (call.k, call.v, call.key)
    )  # fmt: skip
    attend = _compiled if _is_hashable(static) else _some_at_a_time
    out, lse = attend(static, size, *sides, call.arrays)
    return out, lse


def _is_hashable(static: Call) -> bool:
    """Not if a mask of the caller's holds an array."""
    try:
        hash(static)
    except TypeError:
        return False
    return True


def _some_at_a_time(static: Call, size: int, of_queries: Any, of_keys: Any, arrays: Any) -> Any:
    q, query, *pairs = of_queries
    k, v, key = of_keys
    whole = replace(static, k=k, v=v, key=key, arrays=arrays)
    length = q.shape[2]
    full = length // size * size  # the last block begins earlier, where this is less

    def split(array: Array, axis: int = 2) -> Array:
        if full < length:
            last = lax.slice_in_dim(array, length - size, length, axis=axis)
            array = jnp.concat([lax.slice_in_dim(array, 0, full, axis=axis), last], axis=axis)
        return split_blocks(array, axis=axis, size=size, padding=0)

    own = (query.pos, query.seg, query.places)
    blocks = make_varying(
        (
            split(q),
            tuple(None if a is None else split(a, axis=a.ndim - 1) for a in own),
            {name: split(feature) for name, feature in (query.features or {}).items()},
            *(None if a is None else split(a) for a in pairs),
        )
    )
    results = map_blocks(jax.checkpoint(partial(_attend, whole)), blocks)

    def join(blocks: Array) -> Array:
        every = join_blocks(blocks, axis=2, length=blocks.shape[0] * size)
        if full == length:
            return every
        first = lax.slice_in_dim(every, 0, full, axis=2)
        last = lax.slice_in_dim(every, full + size - (length - full), full + size, axis=2)
        return jnp.concat([first, last], axis=2)

    return jax.tree.map(join, results)


_compiled = partial(jax.jit, static_argnums=(0, 1))(_some_at_a_time)


def _attend(whole: Call, block: Any) -> tuple[Array, LogSumExp]:
    """Attention of a block of queries."""
    q, (pos, seg, places), features, sees, bias = block
    mask = whole.mask if sees is None else replace(whole.mask, array=sees)
    query = Tokens(pos, seg, places, features=features)
    return _definition(replace(whole, q=q, query=query, mask=mask, extra_bias=bias))


def _definition(call: Call) -> tuple[Array, LogSumExp]:
    with jax.default_matmul_precision("highest"):
        return dense(call)
