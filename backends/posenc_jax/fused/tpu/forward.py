"""Attention forward on TPUs.

An online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.fused.plan import MIN_SCORE, Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type
from posenc_jax.fused.tpu.grid import GridOrder, QueryMajor, Refs, Step, run_grid
from posenc_jax.fused.tpu.operands import (
    PER_QUERY,
    column_scratch,
    fill_columns,
    head_scalars,
    named_operands,
    on_needed_tile,
    per_token,
    table_tile,
    tile_tokens,
)
from posenc_jax.fused.tpu.tile import (
    LANES,
    LOG2E,
    TileKind,
    across,
    lane_sums,
    masked_scores,
    product,
    to_row,
    without_far,
)


def forward(
    plan: Plan, operands: Operands, integers: Integers, *, interpreted: bool
) -> tuple[Array, Array]:
    """Output and log-sum-exp, as ``Kernels.forward``."""
    q, v, block = operands.q, operands.v, plan.block
    named = named_operands(operands, integers)
    outputs = run_grid(
        _forward,
        QueryMajor(plan, integers),
        named,
        {
            "out": array_type((*q.shape[:3], v.shape[3]), q.dtype),
            "logsumexp": per_token(q, 1),
        },
        {
            "columns": column_scratch(named, PER_QUERY, block),
            "out": pltpu.VMEM((block, v.shape[3]), jnp.float32),
            "highest": pltpu.VMEM((block, LANES), jnp.float32),
            "total": pltpu.VMEM((block, LANES), jnp.float32),
        },
        interpreted=interpreted,
    )
    return outputs["out"], outputs["logsumexp"][:, :, 0]


def _forward(order: GridOrder, step: Step, ins: Refs, outs: Refs, scratch: Refs) -> None:
    out, total, highest = scratch["out"], scratch["total"], scratch["highest"]

    @pl.when(step.is_first)
    def _() -> None:
        fill_columns(scratch["columns"], ins)
        out[...] = jnp.zeros_like(out)
        highest[...] = jnp.full_like(highest, MIN_SCORE)
        total[...] = jnp.zeros_like(total)

    def add_tile(kind: TileKind) -> None:
        tokens = tile_tokens(order, step, ins, scratch["columns"])
        scores = product(ins["q"][...], ins["k"][...], transposed=True)
        scalars = head_scalars(order, step, ins)
        table = table_tile(ins, kind, shift=1)
        scores = masked_scores(order.plan, scores, tokens, scalars, table, masked=kind.masked)
        before = highest[...]
        of_tile = jnp.max(scores, axis=1, keepdims=True)
        after = jnp.maximum(before, of_tile if kind.far is None else of_tile + kind.far)
        shrink = jnp.exp2(before - after)
        weights = jnp.exp2(scores - across(without_far(after, kind), scores.shape[1]))
        highest[...] = after
        total[...] = total[...] * shrink + lane_sums(weights)
        out[...] = out[...] * across(shrink, out.shape[1]) + product(weights, ins["v"][...])

    on_needed_tile(order, step, ins, add_tile)

    @pl.when(step.is_last)
    def _() -> None:
        sums = jnp.sum(total[...], axis=1, keepdims=True)
        fully_masked = sums == 0
        positive = jnp.where(fully_masked, 1.0, sums)
        outs["out"][...] = (out[...] / positive).astype(outs["out"].dtype)
        logsumexp = highest[:, :1] / LOG2E + jnp.log(positive)
        outs["logsumexp"][...] = to_row(jnp.where(fully_masked, MIN_SCORE, logsumexp))
