"""Gradients of queries on TPUs, and of per-head scalars and the queries' feature.

Weights are recomputed from the log-sum-exp (Dao et al. 2022, arXiv 2205.14135). Each result is
summed in a fixed order, so it is deterministic. Gradients of per-head scalars are written per
query, and summed by XLA.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.plan import Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type
from posenc_jax.fused.tpu.grid import GridOrder, QueryMajor, Refs, Step, run_grid
from posenc_jax.fused.tpu.operands import (
    PER_QUERY,
    column_scratch,
    d_scores_of_queries,
    fill_columns,
    head_scalars,
    named_operands,
    on_needed_tile,
    per_token,
    write_rows,
)
from posenc_jax.fused.tpu.tile import LANES, TileKind, bias_derivatives, lane_sums, product


def d_queries(
    plan: Plan, operands: Operands, integers: Integers, residuals: Residuals, *, interpreted: bool
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """As ``Kernels.d_queries``."""
    q, block, scalars = operands.q, plan.block, len(plan.reads.trainable)
    has_feature, has_far = operands.q_feature is not None, operands.far is not None
    named = named_operands(operands, integers, residuals)
    outputs = run_grid(
        _d_queries,
        QueryMajor(plan, integers),
        named,
        {
            "d_q": array_type(q.shape, q.dtype),
            "d_scalars": per_token(q, scalars) if scalars else None,
            "d_q_feature": per_token(q, 1) if has_feature else None,
            "d_far": per_token(q, 2) if has_far else None,
        },
        {
            "columns": column_scratch(named, PER_QUERY, block),
            "d_q": pltpu.VMEM((block, q.shape[3]), jnp.float32),
            "sums": [pltpu.VMEM((block, LANES), jnp.float32)] * (scalars + has_feature),
            "far": [pltpu.VMEM((block, LANES), jnp.float32)] * (2 * has_far),
        },
        interpreted=interpreted,
    )
    d_feature = outputs["d_q_feature"][:, :, 0] if has_feature else None
    return outputs["d_q"], outputs["d_scalars"], d_feature, outputs["d_far"]


def _d_queries(order: GridOrder, step: Step, ins: Refs, outs: Refs, scratch: Refs) -> None:
    plan, d_q, sums, far = order.plan, scratch["d_q"], scratch["sums"], scratch["far"]

    @pl.when(step.is_first)
    def _() -> None:
        fill_columns(scratch["columns"], ins)
        for total in (d_q, *sums, *far):
            total[...] = jnp.zeros_like(total)

    def add_tile(kind: TileKind) -> None:
        columns = scratch["columns"]
        d_scores, tokens = d_scores_of_queries(order, step, ins, columns, kind)
        d_q[...] += product(d_scores, ins["k"][...])
        derivatives = bias_derivatives(plan, tokens, head_scalars(order, step, ins), "query")
        for total, derivative in zip(sums, derivatives, strict=True):
            total[...] += lane_sums(d_scores * derivative)
        if kind.far is not None:
            total = lane_sums(d_scores)
            for target, here in zip(far, (kind.is_before, ~kind.is_before), strict=True):
                target[...] += jnp.where(here, total, 0.0)

    on_needed_tile(order, step, ins, add_tile)

    @pl.when(step.is_last)
    def _() -> None:
        outs["d_q"][...] = (d_q[...] * plan.scale).astype(outs["d_q"].dtype)
        write_rows(outs["d_scalars"], sums[: len(plan.reads.trainable)])
        write_rows(outs["d_q_feature"], sums[len(plan.reads.trainable) :])
        write_rows(outs["d_far"], far)
