"""Gradients of queries on Hopper GPUs, and of per-head scalars and the queries' feature.

Gradients of per-head scalars are summed per query row, in registers, and over rows by XLA. There
are no atomic additions, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.mosaic_gpu.jax_version import plgpu
from posenc_jax.fused.mosaic_gpu.operands import (
    PER_KEY,
    PER_QUERY,
    STATISTICS,
    Buffer,
    load_delta,
    swap_heads,
)
from posenc_jax.fused.mosaic_gpu.prologue import Loop, Scratch, arrange, prologue
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, launch
from posenc_jax.fused.mosaic_gpu.tile import (
    ROWS,
    Shape,
    TileSide,
    bias_tokens,
    d_by_feature,
    d_by_scalar,
    masked_scores,
    plus_product,
    products,
    recompute,
    tile_gradient,
    zeros,
)
from posenc_jax.fused.plan import Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type

COLUMNS = 64  # keys per tile: with 128, registers spill


def d_queries(
    plan: Plan, operands: Operands, integers: Integers, residuals: Residuals, *, interpreted: bool
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """As ``Kernels.d_queries``."""
    batch, heads, q_size, dim = operands.q.shape
    dtype, scalars = operands.q.dtype, len(plan.reads.trainable)
    has_feature = operands.q_feature is not None
    # Sums per row, each of a result with that many.
    sums_of = {"d_scalars": scalars, "d_feature": int(has_feature), "d_far": 2 * plan.has_far}
    count = sum(sums_of.values())
    arrangement = arrange(
        plan,
        operands,
        integers,
        residuals,
        over="keys",
        columns=COLUMNS,
        rows=(*PER_QUERY, *STATISTICS, "q", "d_out"),
        streams=(("k", "v", *PER_KEY),),
    )
    own = {"sums": [Buffer((ROWS,), jnp.float32).scratch(WARPGROUPS) for _ in range(count)]}

    def kernel(warpgroup: Any, refs: Mapping[str, Any], scratch: Scratch) -> None:
        loop = prologue(arrangement, warpgroup, refs, scratch)
        stream, program = loop.streams[0], loop.program
        q, d_out, query = loop.rows["q"], loop.rows["d_out"], loop.row_side()
        logsumexp, delta = loop.logsumexp(loop.rows), load_delta(loop.rows, 0)

        def absorb(step: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_q, *sums = carry
            blocks = stream.wait(step)
            product, d_weights = products((q, blocks["k"]), (d_out, blocks["v"]))
            key = loop.column_side(step, blocks)
            scores = masked_scores(plan, product, query, key, loop.bias(step, product.shape))
            d_scores = tile_gradient(plan, scores, d_weights, logsumexp, delta)
            if plan.has_far:
                sums = _add_far(loop, step, sums, d_scores)
            elif plan.form == "elementwise":
                derivatives = _bias_derivatives(loop, query, key, d_scores.shape) if count else []
                sums = [
                    total + (d_scores * derivative).sum(axis=1)
                    for total, derivative in zip(sums, derivatives, strict=True)
                ]
            d_q = plus_product(d_q, d_scores.astype(dtype), blocks["k"], loop.interpreter_scratch)
            stream.release(step)
            loop.release_bias(step)
            return d_q, *sums

        start = (zeros(ROWS, dim), *(zeros(ROWS) for _ in range(count)))
        d_q, *sums = lax.fori_loop(jnp.int32(0), loop.steps, absorb, start)
        q[...] = (d_q * plan.scale).astype(dtype)
        for buffer, row_sums in zip(scratch.own["sums"], sums, strict=True):
            buffer.at[warpgroup][...] = row_sums
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, program.tokens("d_q", loop.start, ROWS))
        targets = [(name, n) for name, size in sums_of.items() for n in range(size)]
        for (name, n), buffer in zip(targets, scratch.own["sums"], strict=True):
            target = program.refs[name].at[program.batch, program.head, n]
            plgpu.copy_smem_to_gmem(buffer.at[warpgroup], target.at[pl.ds(loop.start, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    results = {"d_q": array_type(arrangement.arrays["q"].shape, dtype)}
    results |= {
        name: array_type((batch, heads, size, q_size), jnp.float32)
        for name, size in sums_of.items()
        if size
    }
    scratch = arrangement.scratch(own, interpreted=interpreted)
    outputs = launch(
        kernel, arrangement.arrays, results, scratch, arrangement.grid, interpreted=interpreted
    )
    return (
        swap_heads(outputs["d_q"]),
        outputs.get("d_scalars"),
        outputs["d_feature"][:, :, 0] if has_feature else None,
        outputs.get("d_far"),
    )


def _add_far(loop: Loop, step: Any, sums: list[Array], d_scores: Array) -> list[Array]:
    """The sums of both far sides, with the rows of a far tile added to its side."""

    def added() -> list[Array]:
        total, side = d_scores.sum(axis=1), loop.far_side(step)
        weights = [(side == n).astype(jnp.float32) for n in range(len(sums))]
        return [before + total * weight for before, weight in zip(sums, weights, strict=True)]

    result: list[Array] = lax.cond(loop.is_near(step), lambda: sums, added)
    return result


def _bias_derivatives(loop: Loop, query: TileSide, key: TileSide, shape: Shape) -> list[Array]:
    """Derivatives of the bias: per trainable per-head scalar, then for the queries' feature."""
    plan, scalars = loop.arrangement.plan, loop.head_scalars
    tokens = bias_tokens(plan, recompute(query), recompute(key), shape)
    derivatives = [d_by_scalar(plan, scalars, n, *tokens) for n in range(len(plan.reads.trainable))]
    if plan.reads.q_feature is not None:
        derivatives.append(d_by_feature(plan, scalars, *tokens, "query"))
    return derivatives
