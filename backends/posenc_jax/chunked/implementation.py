"""Attention in memory O(L * block), forward and backward, with any scheme.

Scores are computed tile by tile under an online softmax (Milakov and Gimelshein 2018, arXiv
1805.02867). The backward pass computes them once more from the saved log-sum-exp (Dao et al. 2022,
arXiv 2205.14135, algorithms 1 and 4). The scheme itself computes a tile's bias, and JAX
differentiates it. On a CPU, heads come one after the other where far keys may be negligible, and
each skips its own.

Letters in shapes: those of ``PositionScheme``, ``G`` query heads per head of keys, ``n`` blocks,
and ``bq`` queries or ``bk`` keys per block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import (
    Call,
    Mask,
    Side,
    as_column,
    as_row,
    may_be_fully_masked,
    visible,
    zero_fully_masked,
)
from posenc_jax.chunked.blocks import (
    Tiling,
    get_block,
    join_blocks,
    make_tiling,
    set_block,
    split_blocks,
)
from posenc_jax.chunked.by_distance import with_table
from posenc_jax.chunked.heads import map_heads
from posenc_jax.chunked.loops import loop_blocks, map_blocks, scan_blocks
from posenc_jax.chunked.ranges import Ranges, needed_ranges
from posenc_jax.chunked.tile import Softmax, tile_gradients, tile_scores
from posenc_jax.derivatives import forbid_forward_mode, forbid_reverse_over_reverse
from posenc_jax.tokens import Keys, Queries
from posenc_jax.trees import Arrays, gradients_as, make_varying, zero_gradients

_NAME = "implementation 'chunked'"


def chunked(call: Call) -> tuple[Array, Array]:
    """Attention ``(B, H, Q, Dv)`` and its log-sum-exp ``(B, H, Q)``, with gradients of both.

    Both are in the working dtype ``call.dtype``; the call's namespace must be ``jax.numpy``. A
    fully masked row is 0, and its log-sum-exp is the lowest finite number.
    """
    call = with_table(call)
    tiling = make_tiling(call)
    q, k, v = call.q, call.k, call.v
    if may_be_fully_masked(call):
        q, k, v = _zero_fully_masked(
            (q, k, v), (call.query.pos, call.query.seg), (call.key.pos, call.key.seg), tiling
        )
    specs = call.scheme.param_specs()
    learned = {name: array for name, array in call.arrays.items() if name in specs}
    fixed = {name: array for name, array in call.arrays.items() if name not in specs}
    out, lse = _attend_compiled(tiling, q, k, v, call.query, call.key, learned, fixed)
    return out, lse


def unsupported(call: Call) -> str | None:
    """Why a call cannot be split into tiles; None if it can."""
    what = "bias" if call.extra_bias is not None else "mask"
    if call.extra_bias is not None or (call.mask is not None and not isinstance(call.mask, Mask)):
        instead = "" if what == "bias" else "; give a mask as a function of positions"
        return f"the caller's {what} is a whole Q x K array, which is not split into tiles{instead}"
    return None


@partial(jax.jit, static_argnums=3)
def _zero_fully_masked(
    tensors: tuple[Array, Array, Array],
    query: tuple[Array, Array | None],
    key: tuple[Array, Array | None],
    tiling: Tiling,
) -> tuple[Array, Array, Array]:
    """Zero fully masked tokens in q, k, v; compiled, so that XLA never holds the whole mask."""
    (q_pos, q_seg), (k_pos, k_seg) = query, key
    at = as_column(q_pos), as_row(k_pos)
    segments = (None, None) if q_seg is None or k_seg is None else (as_column(q_seg), as_row(k_seg))
    mask = visible(
        *at, *segments,
        causal=tiling.causal, window=tiling.window, sink_tokens=tiling.sink_tokens,
    )  # fmt: skip
    if tiling.mask is not None:
        custom = tiling.mask(*at, *segments)
        mask = custom if mask is None else mask & custom
    if mask is None:
        return tensors
    q, k, v = zero_fully_masked(*tensors, mask, xp=jnp)
    return q, k, v


@partial(jax.jit, static_argnums=0)
def _attend_compiled(
    tiling: Tiling,
    q: Array,
    k: Array,
    v: Array,
    query: Side,
    key: Side,
    learned: Arrays,
    fixed: Arrays,
) -> tuple[Array, Array]:
    """Attention and its log-sum-exp, from whole arrays."""
    ranges = None
    if tiling.skips:
        ranges = needed_ranges(tiling, q, k, v, query, key, {**learned, **fixed})
    queries = Queries(
        split_blocks(q, size=tiling.q_block, axis=2), _split_side(query, tiling.q_block)
    )
    keys = Keys(
        split_blocks(k, size=tiling.k_block, axis=2),
        split_blocks(v, size=tiling.k_block, axis=2),
        _split_side(key, tiling.k_block),
        tiling.valid_keys(),
    )
    operands = make_varying((queries, keys, learned, fixed, ranges))
    operands = forbid_forward_mode(operands, _NAME)
    attend = partial(_attend_heads, tiling)
    results = map_heads(attend, operands, tiling.scheme) if tiling.skips else attend(*operands)
    out, lse = (join_blocks(a, axis=2, length=q.shape[2]) for a in results)
    return out, lse


def _attend_heads(
    tiling: Tiling,
    queries: Queries,
    keys: Keys,
    learned: Arrays,
    fixed: Arrays,
    ranges: Ranges | None,
) -> tuple[Array, Array]:
    """Attention ``(n, B, H, bq, Dv)`` of all heads, or of some of them, and its log-sum-exp."""
    count, batch, heads, rows, dim = queries.q.shape
    q = queries.q.reshape(count, batch, keys.k.shape[2], -1, rows, dim)
    results = _attend(tiling, queries._replace(q=q), keys, learned, fixed, ranges)
    out, lse = (a.reshape(count, batch, heads, *a.shape[4:]) for a in results)
    return out, lse


def _split_side(side: Side, size: int) -> Side:
    """Integers ``(n, B or 1, 1, b)`` and features ``(n, B or 1, H or 1, b, ...)``, ``b`` per block.

    Padding repeats the last token, because a scheme may reject positions after it.
    """
    split = partial(split_blocks, size=size, axis=2, mode="edge")
    pos, seg, places = (
        None if a is None else split(jnp.atleast_2d(a)[:, None, :])
        for a in (side.pos, side.seg, side.places)
    )
    return Side(pos, seg, places, {name: split(a) for name, a in side.features.items()})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    tiling: Tiling,
    queries: Queries,
    keys: Keys,
    learned: Arrays,
    fixed: Arrays,
    ranges: Ranges | None,
) -> tuple[Array, Array]:
    """Attention ``(n, B, Hk, G, bq, Dv)`` and its log-sum-exp, in blocks and the working dtype."""
    return _forward(tiling, queries, keys, learned, fixed, ranges)[0]


def _forward(
    tiling: Tiling,
    queries: Queries,
    keys: Keys,
    learned: Arrays,
    fixed: Arrays,
    ranges: Ranges | None,
) -> tuple[tuple[Array, Array], Any]:
    """Attention and log-sum-exp, and the residuals of their gradients."""

    def attend_block(indexed: tuple[Array, Queries, Array | None]) -> tuple[Array, Array, Array]:
        i, query, key_range = indexed
        bounds = tiling.key_blocks(i) if key_range is None else tuple(key_range[:, 0])

        def absorb(j: Array, softmax: Softmax) -> Softmax:
            key = get_block(keys, j)
            scores, _, _ = tile_scores(tiling, query, key, learned, fixed)
            return softmax.absorb(scores, key.v)

        rows, dim = query.q.shape[:-1], keys.v.shape[-1]
        start = make_varying(Softmax.empty(rows, dim, tiling.dtype), query)
        softmax: Softmax = loop_blocks(bounds, absorb, start)
        return softmax.result()

    blocks = jnp.arange(tiling.q_block_count), queries, None if ranges is None else ranges.keys
    results = forbid_reverse_over_reverse(map_blocks(attend_block, blocks), _NAME)
    out, lse, correction = results
    return (out, lse), (queries, keys, learned, fixed, ranges, out, lse, correction)


def _backward(tiling: Tiling, residuals: Any, d_results: tuple[Array, Array]) -> tuple[Any, ...]:
    """Gradients of queries, keys and learned arrays; each score is computed once."""
    queries, keys, learned, fixed, ranges, out, lse, correction = residuals
    d_out, d_lse = d_results
    # The derivative of the log-sum-exp with respect to a score is the weight of its key, so it is
    # enough to subtract d_lse from delta.
    delta = jnp.sum(out * d_out, axis=-1) - d_lse
    rows = (d_out * correction[..., None], lse, delta * correction)

    def add_block(
        sums: tuple[Queries, Arrays], indexed: tuple[Array, Keys, Array | None]
    ) -> tuple[Any, Keys]:
        j, key, query_range = indexed
        bounds = tiling.query_blocks(j) if query_range is None else tuple(query_range[:, 0])

        def add_tile(i: Array, sums: tuple[Queries, Keys, Arrays]) -> tuple[Queries, Keys, Arrays]:
            d_queries, d_key, d_learned = sums
            added = tile_gradients(
                tiling, get_block(queries, i), key, learned, fixed, *get_block(rows, i)
            )
            so_far = get_block(d_queries, i), d_key, d_learned
            d_query, d_key, d_learned = jax.tree.map(jnp.add, so_far, added)
            return set_block(d_queries, d_query, i), d_key, d_learned

        d_queries, d_learned = sums
        start = d_queries, zero_gradients(key, tiling.dtype), d_learned
        d_queries, d_key, d_learned = loop_blocks(bounds, add_tile, start)
        return (d_queries, d_learned), d_key

    start = zero_gradients((queries, learned), tiling.dtype)
    blocks = jnp.arange(tiling.k_block_count), keys, None if ranges is None else ranges.queries
    (d_queries, d_learned), d_keys = scan_blocks(add_block, start, blocks)
    gradients = gradients_as((queries, keys, learned), (d_queries, d_keys, d_learned))
    return *forbid_reverse_over_reverse(gradients, _NAME), None, None


_attend.defvjp(_forward, _backward)
