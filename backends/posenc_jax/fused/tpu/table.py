"""The gradient of a table by distance on TPUs: sums along the diagonals of tiles."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.plan import Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type
from posenc_jax.fused.tpu.grid import Diagonal, GridOrder, Refs, Step, run_grid
from posenc_jax.fused.tpu.operands import (
    PER_QUERY,
    column_scratch,
    d_scores_of_queries,
    fill_columns,
    named_operands,
    on_needed_tile,
)
from posenc_jax.fused.tpu.tile import TileKind, diagonal_sums


def d_table(
    plan: Plan, operands: Operands, integers: Integers, residuals: Residuals, *, interpreted: bool
) -> Array:
    """As ``Kernels.d_table``."""
    assert operands.table is not None
    heads, rows, block = operands.table.shape
    order, diagonals = Diagonal(plan, integers), rows - 1
    named = named_operands(operands, integers, residuals)
    outputs = run_grid(
        _d_table,
        order,
        named,
        {"line": array_type((heads, diagonals, 1, 2 * block), jnp.float32)},
        {"columns": column_scratch(named, PER_QUERY, block)},
        interpreted=interpreted,
    )
    # Diagonal ``d`` has rows ``d`` and ``d + 1`` of the table.
    lines = outputs["line"].reshape(heads, diagonals, 2, block)
    lines = jnp.where(order.visited()[:, None, None], lines, 0.0)
    low, high = (jnp.pad(lines[:, :, row], ((0, 0), (row, 1 - row), (0, 0))) for row in (0, 1))
    return low + high


def _d_table(order: GridOrder, step: Step, ins: Refs, outs: Refs, scratch: Refs) -> None:
    line = outs["line"]

    @pl.when(step.is_first)
    def _() -> None:
        line[...] = jnp.zeros_like(line)

    def add_tile(kind: TileKind) -> None:
        fill_columns(scratch["columns"], ins)
        d_scores, _ = d_scores_of_queries(order, step, ins, scratch["columns"], kind)
        line[...] += diagonal_sums(d_scores)

    on_needed_tile(order, step, ins, add_tile)
