"""What the kernels for TPUs read, by name, and how a step reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.plan import Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type
from posenc_jax.fused.tpu.grid import Diagonal, GridOrder, KeyMajor, Refs, Step
from posenc_jax.fused.tpu.tile import (
    LANES,
    LOG2E,
    TileKind,
    TileTokens,
    across,
    iota,
    masked_scores,
    product,
    tile_gradient,
    to_column,
    to_row,
    toeplitz,
    without_far,
)

PER_QUERY = ("q_pos", "q_seg", "q_feature", "logsumexp", "delta")
PER_KEY = ("k_pos", "k_seg", "k_feature")


def named_operands(
    operands: Operands,
    integers: Integers,
    residuals: Residuals | None = None,
    *,
    flipped: bool = False,
) -> dict[str, Any]:
    """All operands by name, as ``run_grid`` takes them; ``flipped`` for keys as rows."""
    named: dict[str, Any] = {"q": operands.q, "k": operands.k, "v": operands.v}
    for name in ("q_pos", "k_pos", "q_seg", "k_seg"):
        array = getattr(integers, name)
        named[name] = None if array is None else array[:, None, None, :]
    for name in ("q_feature", "k_feature"):
        array = getattr(operands, name)
        named[name] = None if array is None else array[:, :, None, :]
    scalars, far = operands.head_scalars, operands.far
    named["head_scalars"] = None if scalars is None else scalars.reshape(1, -1)
    named["far"] = None if far is None else far.reshape(1, -1) * LOG2E
    named["low"] = named["high"] = None
    if operands.table is not None:
        table = jnp.flip(operands.table, (1, 2)) if flipped else operands.table
        named["low"] = named["high"] = table[:, :, None, :] * LOG2E
    if residuals is not None:
        named["d_out"] = residuals.d_out
        named["logsumexp"] = residuals.logsumexp[:, :, None] * LOG2E
        named["delta"] = residuals.delta[:, :, None]
    return named


def per_token(like: Array, count: int) -> jax.ShapeDtypeStruct:
    """``(B, H, count, L)`` float32, for an array ``(B, H, L, ...)``."""
    batch, heads, length = like.shape[:3]
    return array_type((batch, heads, count, length), jnp.float32)


def column_scratch(named: Mapping[str, Any], names: Iterable[str], size: int) -> dict[str, Any]:
    """Scratch for the numbers of the tokens along the rows of a tile."""
    present = (name for name in names if named.get(name) is not None)
    return {name: pltpu.VMEM((size, LANES), named[name].dtype) for name in present}


def fill_columns(columns: Refs, ins: Refs) -> None:
    """Turn the numbers of the tokens along the rows of a tile into columns."""
    for name, column in columns.items():
        column[...] = to_column(ins[name][...])


def on_needed_tile(
    order: GridOrder, step: Step, ins: Refs, compute: Callable[[TileKind], None]
) -> None:
    """Call ``compute(kind)`` if a step has a tile.

    Each kind of tile is compiled whole: a mask or a table costs operations for every score, and a
    branch within a tile would store its scores.
    """
    plan = order.plan
    q_start, k_start = _starts(plan, step)
    masked = plan.needs_mask(
        q_start, plan.block, k_start, plan.block, has_segments=ins["q_seg"] is not None
    )
    near = TileKind(masked=masked is not False)
    if not plan.has_far:
        _when(step.needed, masked, near, compute)
        return
    first, end = plan.near
    diagonal = step.k_block - step.q_block
    is_before = diagonal < first
    is_far = is_before | (diagonal >= end)
    # A row has two or three near tiles, one of them masked: not worth two kinds.
    pl.when(step.needed & ~is_far)(lambda: compute(near))
    if not isinstance(order, Diagonal):
        before, after = (ins["far"][0, 2 * step.head + n] for n in (0, 1))
        far = near._replace(far=jnp.where(is_before, before, after), is_before=is_before)
        _when(step.needed & is_far, masked, far, compute)


def _when(condition: Any, masked: Any, kind: TileKind, compute: Callable[[TileKind], None]) -> None:
    """Compute a kind of tile, with a mask or without one, on a condition."""
    if not isinstance(masked, bool):
        pl.when(condition & ~masked)(lambda: compute(kind._replace(masked=False)))
        condition = condition & masked
    pl.when(condition)(lambda: compute(kind))


def _starts(plan: Plan, step: Step) -> tuple[Any, Any]:
    """The default positions of the first query and of the first key of a tile."""
    return step.q_block * plan.block + (plan.k_len - plan.q_len), step.k_block * plan.block


def tile_tokens(order: GridOrder, step: Step, ins: Refs, columns: Refs) -> TileTokens:
    """The queries and keys of a tile."""
    plan = order.plan
    key_axis, query_axis = (0, 1) if isinstance(order, KeyMajor) else (1, 0)

    def read(name: str) -> Array | None:
        if name not in columns and ins[name] is None:
            return None
        if name in columns:
            return across(columns[name][...], plan.block)
        values: Array = ins[name][...]
        return values

    q_start, k_start = _starts(plan, step)
    k_index = iota(k_start, plan.block, key_axis)
    q_pos, k_pos = read("q_pos"), read("k_pos")
    if q_pos is None or k_pos is None:
        q_pos, k_pos = iota(q_start, plan.block, query_axis), k_index
    return TileTokens(
        q_pos=q_pos,
        k_pos=k_pos,
        k_index=k_index,
        q_seg=read("q_seg"),
        k_seg=read("k_seg"),
        q_feature=read("q_feature"),
        k_feature=read("k_feature"),
    )


def head_scalars(order: GridOrder, step: Step, ins: Refs) -> list[Any]:
    """The scalars of the bias for a head."""
    scalars = ins["head_scalars"]
    if scalars is None:
        return []
    per_head = scalars.shape[1] // order.heads
    return [scalars[0, step.head * per_head + n] for n in range(len(order.plan.reads.scalars))]


def table_tile(ins: Refs, kind: TileKind, *, shift: int) -> Array | None:
    """A bias by distance on a near tile; None for far ones and other forms."""
    if ins["low"] is None or kind.far is not None:
        return None
    return toeplitz(ins["low"][...], ins["high"][...], shift=shift)


def d_scores_of_queries(
    order: GridOrder, step: Step, ins: Refs, columns: Refs, kind: TileKind
) -> tuple[Array, TileTokens]:
    """Gradient of the scores of a tile with queries as rows, and the tokens of the tile."""
    tokens = tile_tokens(order, step, ins, columns)
    scores = product(ins["q"][...], ins["k"][...], transposed=True)
    scalars = head_scalars(order, step, ins)
    table = table_tile(ins, kind, shift=1)
    scores = masked_scores(order.plan, scores, tokens, scalars, table, masked=kind.masked)
    d_weights = product(ins["d_out"][...], ins["v"][...], transposed=True)
    logsumexp, delta = without_far(columns["logsumexp"][...], kind), columns["delta"][...]
    logsumexp, delta = (across(column, scores.shape[1]) for column in (logsumexp, delta))
    _, d_scores = tile_gradient(scores, d_weights, logsumexp, delta)
    return d_scores, tokens


def write_rows(target: Any, sums: Any) -> None:
    """Write sums by lane as rows of numbers per token."""
    for n, total in enumerate(sums):
        target[n : n + 1, :] = to_row(jnp.sum(total[...], axis=1, keepdims=True))
