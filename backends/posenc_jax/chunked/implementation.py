"""Attention in memory O(L * block), forward and backward, with any scheme.

Scores are computed tile by tile under an online softmax (Milakov and Gimelshein 2018, arXiv
1805.02867), and once more in the backward pass from the saved log-sum-exp (Dao et al. 2022, arXiv
2205.14135, algorithms 1 and 4). A tile's bias is the scheme's own, and so is its gradient.
"""

from __future__ import annotations

from dataclasses import replace
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
from posenc_jax.chunked.blocks import Tiling, block, cut, joined, tiling_of, with_block
from posenc_jax.chunked.loops import each, loop, scan, varying
from posenc_jax.chunked.tile import Arrays, Keys, Queries, Softmax, gradients, scored
from posenc_jax.derivatives import no_reverse_twice, reverse_only

_NAME = "implementation 'chunked'"


def chunked(call: Call) -> tuple[Array, Array]:
    """``(B, H, Q, Dv)``, and the log of the sum of ``exp(score)``, ``(B, H, Q)``.

    Both in the working float, with gradients of both, from a call whose namespace is ``jax.numpy``.
    A row that sees nothing is 0, its log-sum-exp the lowest finite number.
    """
    tiling = tiling_of(call)
    if may_be_fully_masked(call):
        q, k, v = _without_unseen(
            (call.q, call.k, call.v), (call.query.pos, call.query.seg),
            (call.key.pos, call.key.seg), tiling,
        )  # fmt: skip
        call = replace(call, q=q, k=k, v=v)
    batch, heads, q_len, dim = call.q.shape
    q = call.q.reshape(batch, call.k.shape[1], -1, q_len, dim)
    queries = Queries(cut(q, size=tiling.q_block, axis=3), _in_blocks(call.query, tiling.q_block))
    keys = Keys(
        cut(call.k, size=tiling.k_block, axis=2),
        cut(call.v, size=tiling.k_block, axis=2),
        _in_blocks(call.key, tiling.k_block),
        tiling.real_keys(),
    )
    specs = call.scheme.param_specs()
    learned = {name: array for name, array in call.arrays.items() if name in specs}
    fixed = {name: array for name, array in call.arrays.items() if name not in specs}
    everything = varying((queries, keys, learned, fixed))
    out, logsumexp = (
        joined(a, axis=3, length=q_len).reshape(batch, heads, q_len, *a.shape[5:])
        for a in _compiled(tiling, *everything)
    )
    return out, logsumexp


def refuses(call: Call) -> str | None:
    """Why a call cannot be cut into tiles."""
    what = "bias" if call.extra_bias is not None else "mask"
    if call.extra_bias is not None or (call.mask is not None and not isinstance(call.mask, Mask)):
        instead = "" if what == "bias" else "; a mask that is a function of positions is cut"
        return f"the {what} of the caller is all of Q x K already, and its tiles are not{instead}"
    return None


@partial(jax.jit, static_argnums=3)
def _without_unseen(
    tensors: tuple[Array, Array, Array],
    query: tuple[Array, Array | None],
    key: tuple[Array, Array | None],
    tiling: Tiling,
) -> tuple[Array, Array, Array]:
    """q, k and v, 0 where nobody sees them; compiled, so that no mask is ever whole."""
    (q_pos, q_seg), (k_pos, k_seg) = query, key
    at = as_column(q_pos), as_row(k_pos)
    segments = (None, None) if q_seg is None or k_seg is None else (as_column(q_seg), as_row(k_seg))
    seen = visible(
        *at, *segments,
        causal=tiling.causal, window=tiling.window, sink_tokens=tiling.sink_tokens,
    )  # fmt: skip
    if tiling.mask is not None:
        own = tiling.mask(*at, *segments)
        seen = own if seen is None else seen & own
    return tensors if seen is None else zero_fully_masked(*tensors, seen, xp=jnp)


def _in_blocks(side: Side, size: int) -> Side:
    """Positions, segments and features in blocks; padding repeats the last, which exists."""
    pos, seg, places = (
        None if a is None else cut(jnp.atleast_2d(a)[:, None, :], size=size, axis=2, mode="edge")
        for a in (side.pos, side.seg, side.places)
    )
    features = {n: cut(a, size=size, axis=2, mode="edge") for n, a in side.features.items()}
    return Side(pos, seg, places, features)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    tiling: Tiling, queries: Queries, keys: Keys, learned: Arrays, fixed: Arrays
) -> tuple[Array, Array]:
    """Attention ``(n, B, Hk, G, bq, Dv)`` and log-sum-exp in the working float, all in blocks."""
    return _forward(tiling, queries, keys, learned, fixed)[0]


def _forward(
    tiling: Tiling, queries: Queries, keys: Keys, learned: Arrays, fixed: Arrays
) -> tuple[tuple[Array, Array], Any]:
    """Attention and log-sum-exp, and what their gradients are computed from."""

    def one_block(at: tuple[Array, Queries]) -> tuple[Array, Array, Array]:
        i, query = at

        def absorb(j: Array, softmax: Softmax) -> Softmax:
            key = block(keys, j)
            scores, _, _ = scored(tiling, query, key, learned, fixed)
            return softmax.absorb(scores, key.values)

        rows, dim = query.vectors.shape[:-1], keys.values.shape[-1]
        nothing = varying(Softmax.of_nothing(rows, dim, tiling.dtype), query)
        return loop(tiling.keys_of(i), absorb, nothing).result()

    out, logsumexp, lacking = each(one_block, (jnp.arange(tiling.q_blocks), queries))
    out, logsumexp, lacking = no_reverse_twice((out, logsumexp, lacking), _NAME)
    return (out, logsumexp), (queries, keys, learned, fixed, out, logsumexp, lacking)


def _backward(tiling: Tiling, saved: Any, d_results: tuple[Array, Array]) -> tuple[Any, ...]:
    """Gradients of queries, keys and learned arrays; each score is computed once."""
    queries, keys, learned, fixed, out, logsumexp, lacking = saved
    d_out, d_logsumexp = d_results
    # The log-sum-exp's gradient by a score is the score's weight, and delta is what weights take.
    delta = jnp.sum(out * d_out, axis=-1) - d_logsumexp
    rows = (d_out * lacking[..., None], logsumexp, delta * lacking)

    def one_block(sums: tuple[Queries, Arrays], at: tuple[Array, Keys]) -> tuple[Any, Keys]:
        j, key = at

        def add_tile(i: Array, sums: tuple[Queries, Keys, Arrays]) -> tuple[Queries, Keys, Arrays]:
            d_queries, *others = sums
            added = gradients(tiling, block(queries, i), key, learned, fixed, *block(rows, i))
            d_query, *others = jax.tree.map(jnp.add, (block(d_queries, i), *others), added)
            return with_block(d_queries, d_query, i), *others

        start = (sums[0], _zeros(key, tiling.dtype), sums[1])
        d_queries, d_key, d_learned = loop(tiling.queries_of(j), add_tile, start)
        return (d_queries, d_learned), d_key

    nothing = _zeros(queries, tiling.dtype), _zeros(learned, tiling.dtype)
    blocks = jnp.arange(tiling.k_blocks), keys
    (d_queries, d_learned), d_keys = scan(one_block, nothing, blocks)
    found = _like(queries, d_queries), _like(keys, d_keys), _like(learned, d_learned)
    return *no_reverse_twice(found, _NAME), None


_attend.defvjp(_forward, _backward)


@partial(jax.jit, static_argnums=0)
def _compiled(tiling: Tiling, *arrays: Any) -> tuple[Array, Array]:
    return _attend(tiling, *reverse_only(arrays, _NAME))


def _zeros(arrays: Any, dtype: Any) -> Any:
    """Where gradients are summed; None for integers, which have none."""
    zeros = jax.tree.map(
        lambda a: jnp.zeros(a.shape, dtype) if jnp.isdtype(a.dtype, "real floating") else None,
        arrays,
    )
    return varying(zeros, arrays)


def _like(arrays: Any, gradients: Any) -> Any:
    """Gradients in the dtypes of their arrays."""
    return jax.tree.map(
        lambda g, a: None if g is None else g.astype(a.dtype),
        gradients,
        arrays,
        is_leaf=lambda g: g is None,
    )
