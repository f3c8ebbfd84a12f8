"""Attention of a scheme that adjusts whole rows of scores: some queries at a time.

Memory is ``O(H L)``. The backward pass computes each block again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array

from posenc.backend import Call, Tokens, dense, queries_of
from posenc_jax.chunked.blocks import (
    join_blocks,
    most_queries,
    split_blocks,
    split_tokens,
)
from posenc_jax.chunked.loops import map_blocks
from posenc_jax.trees import make_varying

_SCORES, _ON_A_DEVICE = 2**19, 2**24  # at a time; on a CPU they stay in a cache


def by_rows(call: Call) -> tuple[Array, Array]:
    """``(B, H, Q, Dv)`` and the log-sum-exp ``(B, H, Q)``, in the working dtype."""
    scores = _SCORES if jax.default_backend() == "cpu" else _ON_A_DEVICE
    size = queries_of(call, scores, most=most_queries())
    if size == call.q.shape[2]:
        return _definition(call)
    # What decides the program, and may be compared: so that it is compiled once.
    none: Any = None
    static = replace(
        call, q=none, k=none, v=none, arrays=none, query=none, key=none, extra_bias=None,
        sink=None, regions=(), shared=None, mask=replace(call.mask, array=None), aligned=False,
    )  # fmt: skip
    sides = (call.q, call.query, call.mask.array, call.extra_bias), (call.k, call.v, call.key)
    out, lse = _some_at_a_time(static, size, *sides, call.arrays)
    return out, lse


@partial(jax.jit, static_argnums=(0, 1))
def _some_at_a_time(static: Call, size: int, of_queries: Any, of_keys: Any, arrays: Any) -> Any:
    q, query, *pairs = of_queries
    padding = -q.shape[2] % size
    split = partial(split_blocks, axis=2, size=size, padding=padding)
    k, v, key = of_keys
    whole = replace(static, k=k, v=v, key=key, arrays=arrays)
    blocks = make_varying(
        (
            split(q),
            split_tokens(query, size=size, padding=padding),
            *(None if a is None else split(a) for a in pairs),
        )
    )
    results = map_blocks(jax.checkpoint(partial(_attend, whole)), blocks)
    return tuple(join_blocks(a, axis=2, length=q.shape[2]) for a in results)


def _attend(whole: Call, block: tuple[Array, Tokens, Array | None, Array | None]) -> Any:
    """Attention of a block of queries, whose tokens have an axis more, of length 1."""
    q, query, sees, bias = block
    pos, seg, places = (
        None if a is None else a[:, 0] for a in (query.pos, query.seg, query.places)
    )
    mask = whole.mask if sees is None else replace(whole.mask, array=sees)
    query = Tokens(pos, seg, places, features=query.features)
    return _definition(replace(whole, q=q, query=query, mask=mask, extra_bias=bias))


def _definition(call: Call) -> tuple[Array, Array]:
    with jax.default_matmul_precision("highest"):
        return dense(call)
