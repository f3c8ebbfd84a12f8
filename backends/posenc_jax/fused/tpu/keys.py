"""Gradients of keys and values on TPUs, on tiles with keys as rows."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.plan import Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type
from posenc_jax.fused.tpu.grid import GridOrder, KeyMajor, Refs, Step, run_grid
from posenc_jax.fused.tpu.operands import (
    PER_KEY,
    column_scratch,
    fill_columns,
    head_scalars,
    named_operands,
    on_needed_tile,
    per_token,
    table_tile,
    tile_tokens,
    write_rows,
)
from posenc_jax.fused.tpu.tile import (
    LANES,
    TileKind,
    bias_derivatives,
    lane_sums,
    masked_scores,
    product,
    tile_gradient,
    without_far,
)


def d_keys(
    plan: Plan, operands: Operands, integers: Integers, residuals: Residuals, *, interpreted: bool
) -> tuple[Array, Array, Array | None]:
    """As ``Kernels.d_keys``."""
    q, v, block, k_feature = operands.q, operands.v, plan.block, operands.k_feature
    k_shape = (*q.shape[:2], operands.k.shape[2])
    named = named_operands(operands, integers, residuals, flipped=True)
    outputs = run_grid(
        _d_keys,
        KeyMajor(plan, integers),
        named,
        {
            "d_k": array_type((*k_shape, q.shape[3]), q.dtype),
            "d_v": array_type((*k_shape, v.shape[3]), v.dtype),
            "d_k_feature": None if k_feature is None else per_token(k_feature, 1),
        },
        {
            "columns": column_scratch(named, PER_KEY, block),
            "d_k": pltpu.VMEM((block, q.shape[3]), jnp.float32),
            "d_v": pltpu.VMEM((block, v.shape[3]), jnp.float32),
            "sums": [pltpu.VMEM((block, LANES), jnp.float32)] * (k_feature is not None),
        },
        interpreted=interpreted,
    )
    d_feature = None if k_feature is None else outputs["d_k_feature"][:, :, 0]
    return outputs["d_k"], outputs["d_v"], d_feature


def _d_keys(order: GridOrder, step: Step, ins: Refs, outs: Refs, scratch: Refs) -> None:
    plan, d_k, d_v, sums = order.plan, scratch["d_k"], scratch["d_v"], scratch["sums"]

    @pl.when(step.is_first)
    def _() -> None:
        fill_columns(scratch["columns"], ins)
        for total in (d_k, d_v, *sums):
            total[...] = jnp.zeros_like(total)

    def add_tile(kind: TileKind) -> None:
        tokens = tile_tokens(order, step, ins, scratch["columns"])
        scalars = head_scalars(order, step, ins)
        q, d_out = ins["q"][...], ins["d_out"][...]
        scores = product(ins["k"][...], q, transposed=True)
        table = table_tile(ins, kind, shift=0)
        scores = masked_scores(plan, scores, tokens, scalars, table, masked=kind.masked)
        d_weights = product(ins["v"][...], d_out, transposed=True)
        logsumexp, delta = without_far(ins["logsumexp"][...], kind), ins["delta"][...]
        weights, d_scores = tile_gradient(scores, d_weights, logsumexp, delta)
        d_k[...] += product(d_scores, q)
        d_v[...] += product(weights, d_out)
        derivatives = bias_derivatives(plan, tokens, scalars, "key")
        for total, derivative in zip(sums, derivatives, strict=True):
            total[...] += lane_sums(d_scores * derivative)

    on_needed_tile(order, step, ins, add_tile)

    @pl.when(step.is_last)
    def _() -> None:
        outs["d_k"][...] = (d_k[...] * plan.scale).astype(outs["d_k"].dtype)
        outs["d_v"][...] = d_v[...].astype(outs["d_v"].dtype)
        write_rows(outs["d_k_feature"], sums)
