"""Attention in memory O(L * block), forward and backward, with any scheme.

Scores are computed tile by tile under an online softmax (Milakov and Gimelshein 2018, arXiv
1805.02867). The backward pass computes them once more from the saved log-sum-exp (Dao et al. 2022,
arXiv 2205.14135, algorithms 1 and 4). The scheme itself computes a tile's bias, and JAX
differentiates it. On a CPU, each head skips its own negligible blocks, and tiles of several heads
are computed side by side.

Letters in shapes: those of ``PositionScheme``, ``G`` query heads per head of keys, ``n`` blocks,
and ``bq`` queries or ``bk`` keys per block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc.backend import (
    Call,
    LogSumExp,
    Planned,
    Refusal,
    Tokens,
    adjusts_rows,
    may_be_fully_masked,
    plan_unless,
    visible_pairs,
    zero_fully_masked,
)
from posenc_jax.chunked.blocks import (
    Index,
    Tiling,
    join_blocks,
    make_tiling,
    split_blocks,
)
from posenc_jax.chunked.by_distance import TABLE, of_terms, pad_table, split_bias
from posenc_jax.chunked.decay import lies_before
from posenc_jax.chunked.lanes import (
    Group,
    add_arrays,
    add_blocks,
    get_arrays,
    get_blocks,
    join_heads,
    make_jobs,
    separate_heads,
    separate_params,
)
from posenc_jax.chunked.loops import loop_blocks, map_blocks, scan_blocks
from posenc_jax.chunked.ranges import Ranges, needed_ranges, visible_ranges
from posenc_jax.chunked.rows import by_rows
from posenc_jax.chunked.tile import Softmax, absorb_tile, tile_gradients, turn
from posenc_jax.closures import why_not_static
from posenc_jax.derivatives import forbid_forward_mode, forbid_reverse_over_reverse
from posenc_jax.fused.shapes import is_symbolic
from posenc_jax.tokens import Keys, Queries
from posenc_jax.trees import Arrays, gradients_as, make_varying, zero_gradients

_NAME = "implementation 'chunked'"

# The axis of tokens in blocks, after that of lanes
_OF_QUERIES, _OF_KEYS = Queries._make((4, 3)), Keys._make((4, 3, 3, 3))


def chunked(call: Call) -> tuple[Array, LogSumExp]:
    """Attention ``(B, H, Q, Dv)`` and its log-sum-exp, with gradients of both.

    Both are in the working dtype ``call.dtype``; the call's namespace must be ``jax.numpy``. A
    fully masked row is 0.
    """
    table, by_pair = split_bias(call)
    tiling = make_tiling(call, has_table=table is not None, by_pair=by_pair)
    q, k, v = call.q, call.k, call.v
    if may_be_fully_masked(call):
        q, k, v = _zero_fully_masked(
            (q, k, v),
            Tokens(call.query.pos, call.query.seg),
            Tokens(call.key.pos, call.key.seg),
            tiling,
        )
    specs = call.scheme.param_specs()
    learned = {name: array for name, array in call.arrays.items() if name in specs}
    fixed = {name: array for name, array in call.arrays.items() if name not in specs}
    out, lse = _attend_compiled(tiling, q, k, v, call.query, call.key, learned, fixed, table)
    return out, lse


def plan(call: Call) -> Planned | Refusal:
    """How a call is split into tiles, or why it cannot be."""
    if is_symbolic(call):
        return Refusal("a length or the batch is symbolic, and its blocks need numbers")
    if adjusts_rows(call):
        return Planned(by_rows)
    what = "bias" if call.extra_bias is not None else "mask"
    if call.extra_bias is not None or call.mask.array is not None:
        instead = "" if what == "bias" else "; give a mask as a function of positions"
        return Refusal(
            f"the caller's {what} is a whole Q x K array, which is not split into tiles{instead}"
        )
    return plan_unless(why_not_static(call.mask), Planned(chunked))


@partial(jax.jit, static_argnums=3)
def _zero_fully_masked(
    tensors: tuple[Array, Array, Array],
    query: Tokens,
    key: Tokens,
    tiling: Tiling,
) -> tuple[Array, Array, Array]:
    """Zero fully masked tokens in q, k, v; compiled, so that XLA never holds the whole mask."""
    mask = visible_pairs(tiling.mask, query, key, jnp)
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
    query: Tokens,
    key: Tokens,
    learned: Arrays,
    fixed: Arrays,
    table: Array | None,
) -> tuple[Array, LogSumExp]:
    """Attention and its log-sum-exp, from whole arrays."""
    if tiling.skips:
        ranges = needed_ranges(tiling, q, k, v, query, key, {**learned, **fixed})
    else:
        ranges = visible_ranges(tiling, query, key)
    if table is not None:
        learned, fixed = (of_terms(arrays, tiling.by_pair) for arrays in (learned, fixed))
        learned = {**learned, TABLE: pad_table(table, tiling)}
    of_q, of_k = (
        dict[str, Any](size=size, padding=padding)
        for size, padding in zip((tiling.q_block, tiling.k_block), tiling.padding, strict=True)
    )
    queries = Queries(split_blocks(q, axis=2, **of_q), _split_side(query, **of_q))
    keys = Keys(
        split_blocks(jnp.swapaxes(k, 2, 3), axis=3, **of_k),
        split_blocks(v, axis=2, **of_k),
        _split_side(key, **of_k),
        tiling.valid_keys(),
    )
    separate = tiling.heads > 1
    queries, keys = separate_heads((queries, keys), separate=separate)
    specs = tiling.scheme.param_specs()
    shared = frozenset(name for name, spec in specs.items() if not spec.per_head)
    learned, fixed = (separate_params(a, shared, tiling.heads) for a in (learned, fixed))
    # Heads that share keys are an axis of a tile that has all heads.
    group = 1 if separate else q.shape[1] // k.shape[1]
    grouped = queries.q.reshape(*queries.q.shape[:3], -1, group, *queries.q.shape[4:])
    operands = make_varying((queries._replace(q=grouped), keys, learned, fixed, ranges))
    operands = forbid_forward_mode(operands, _NAME)
    results = _attend(tiling, *operands)

    def together(a: Array) -> Array:
        heads = join_heads(a.reshape(*a.shape[:3], -1, *a.shape[5:]))
        return join_blocks(heads, axis=2, length=q.shape[2])

    whole: tuple[Array, LogSumExp] = jax.tree.map(together, results)
    return whole


def _split_side(side: Tokens, size: int, padding: int) -> Tokens:
    """Integers ``(n, B or 1, 1, b)`` and features ``(n, B or 1, H or 1, b, ...)``, ``b`` per block.

    Padding repeats the last token, because a scheme may reject positions after it.
    """
    split = partial(split_blocks, size=size, padding=padding, axis=2, mode="edge")
    pos, seg, places = (
        None if a is None else split(jnp.atleast_2d(a)[:, None, :])
        for a in (side.pos, side.seg, side.places)
    )
    features = {name: split(a) for name, a in (side.features or {}).items()}
    return Tokens(pos, seg, places, features=features)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    tiling: Tiling,
    queries: Queries,
    keys: Keys,
    learned: Arrays,
    fixed: Arrays,
    ranges: Ranges,
) -> tuple[Array, LogSumExp]:
    """Attention ``(heads, n, B, Hk, G, bq, Dv)`` and its log-sum-exp, in the working dtype.

    ``heads`` are separate heads, or 1; all arrays have that axis, of as many or fewer.
    """
    return _forward(tiling, queries, keys, learned, fixed, ranges)[0]


def _forward(
    tiling: Tiling,
    queries: Queries,
    keys: Keys,
    learned: Arrays,
    fixed: Arrays,
    ranges: Ranges,
) -> tuple[tuple[Array, LogSumExp], Any]:
    """Attention and log-sum-exp, and the residuals of their gradients."""
    heads, width = tiling.heads, tiling.k_width
    jobs = make_jobs(ranges.keys, tiling.lanes(queries.q.shape[2]))

    def attend_group(group: Group) -> tuple[Array, LogSumExp]:
        query = get_blocks(queries, _OF_QUERIES, group.head, group.block, 1, heads=heads)
        arrays = get_arrays((learned, fixed), group.head, heads=heads)

        def absorb(n: Index, softmax: Softmax) -> Softmax:
            at = group.head, group.next(n, width)
            key = get_blocks(keys, _OF_KEYS, *at, width, heads=heads)
            step = partial(absorb_tile, tiling, lies_before(tiling, query, key))
            absorbed = jax.vmap(step)(softmax, query, key, *arrays)
            kept: Softmax = group.keep(n, width, absorbed, softmax)
            return kept

        rows, dim = query.q.shape[:-1], keys.v.shape[-1]
        start = make_varying(Softmax.empty(rows, dim, tiling.dtype), query)
        bounds = group.bounds(tiling.k_block_count, width)
        softmax: Softmax = loop_blocks(bounds, absorb, start)
        return softmax.result()

    results = jobs.join(map_blocks(attend_group, jobs.groups))
    out, lse = forbid_reverse_over_reverse(results, _NAME)
    return (out, lse), (queries, keys, learned, fixed, ranges, out, lse)


def _backward(
    tiling: Tiling, residuals: Any, d_results: tuple[Array, LogSumExp]
) -> tuple[Any, ...]:
    """Gradients of queries, keys and learned arrays; each score is computed once."""
    queries, keys, learned, fixed, ranges, out, lse = residuals
    d_out, d_lse = d_results
    # The derivative of log_total with respect to a score is the weight of its key, so it is enough
    # to subtract d_lse.log_total from delta.
    delta = _sum_of_products(out, d_out) - d_lse.log_total
    # Weights are exp(score - rounded) times the correction. It is about 1, except where scores are
    # so large that the sum has no digits left for log_total.
    no_key = jnp.isneginf(lse.log_total)
    rounded = jnp.where(no_key, jnp.inf, lse.rounded())  # weights are 0
    correction = jnp.where(no_key, 1, jnp.exp(-lse.minus(rounded)))
    rows = _pad_blocks((d_out * correction[..., None], rounded, delta * correction), tiling)
    heads, width = tiling.heads, tiling.q_width
    jobs = make_jobs(ranges.queries, tiling.lanes(queries.q.shape[2]))

    def add_group(sums: tuple[Queries, Keys, Arrays], group: Group) -> tuple[Any, None]:
        key = get_blocks(keys, _OF_KEYS, group.head, group.block, 1, heads=heads)
        own, own_fixed = get_arrays((learned, fixed), group.head, heads=heads)
        turned = turn(key)

        def add_tile(n: Index, sums: tuple[Queries, Any]) -> tuple[Queries, Any]:
            d_queries, so_far = sums
            at = group.head, group.next(n, width)
            query, row = get_blocks((queries, rows), (_OF_QUERIES, 4), *at, width, heads=heads)
            before = lies_before(tiling, query, key)
            tile = jax.vmap(partial(tile_gradients, tiling, before))
            added = tile(query, key, own, own_fixed, turned, row)
            d_query, *added = group.keep(n, width, added)
            d_queries = add_blocks(d_queries, d_query, _OF_QUERIES, *at, width, heads=heads)
            return d_queries, jax.tree.map(jnp.add, so_far, tuple(added))

        d_queries, d_keys, d_learned = sums
        start = d_queries, zero_gradients((key._replace(v=turned[1]), own), tiling.dtype)
        bounds = group.bounds(tiling.q_block_count, width)
        d_queries, (d_key, d_own) = loop_blocks(bounds, add_tile, start)
        d_key = d_key._replace(v=jnp.swapaxes(d_key.v, -1, -2))
        d_keys = add_blocks(d_keys, d_key, _OF_KEYS, group.head, group.block, 1, heads=heads)
        return (d_queries, d_keys, add_arrays(d_learned, d_own, group.head, heads=heads)), None

    start = zero_gradients((queries, keys, learned), tiling.dtype)
    sums, _ = scan_blocks(add_group, start, jobs.groups)
    gradients = gradients_as((queries, keys, learned), sums)
    return *forbid_reverse_over_reverse(gradients, _NAME), None, None


def _sum_of_products(left: Array, right: Array) -> Array:
    """``sum(left * right, axis=-1)``, which takes XLA on a CPU forty times as long."""
    return jnp.einsum("...d,...d->...", left, right, precision=lax.Precision.HIGHEST)


def _pad_blocks(rows: Any, tiling: Tiling) -> Any:
    """``d_out``, log-sum-exp and delta ``(heads, n, ...)``, with blocks of padding.

    Their log-sum-exp is infinite, so that their weights are 0, however large a bias is.
    """
    return tuple(
        jnp.pad(
            a, ((0, 0), (0, tiling.q_width - 1), *[(0, 0)] * (a.ndim - 2)), constant_values=value
        )
        for a, value in zip(rows, (0, jnp.inf, 0), strict=True)
    )


_attend.defvjp(_forward, _backward)
