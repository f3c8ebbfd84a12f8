"""The order in which kernels for TPUs visit tiles: which blocks a step has, and what it fetches.

The ranges ``first .. end - 1`` of needed blocks are prefetched scalars, which the index maps read.
A step outside of its range takes the index of the nearest needed block. Pallas fetches a block only
if its index changes, so this step fetches nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.fused.plan import Integers, Operands, Plan

Refs = dict[str, Any]
Kernel = Callable[["GridOrder", "Step", Refs, Refs, Refs], None]

MATRICES = ("q", "k", "v", "d_out", "out", "d_q", "d_k", "d_v")
PER_KEY = ("k", "v", "k_pos", "k_seg", "k_feature", "d_k", "d_v", "d_k_feature")


class Step(NamedTuple):
    """A step of a grid.

    Attributes
    ----------
    batch, head, q_block, k_block
        The tile.
    needed
        Whether the tile is in its range.
    is_first, is_last
        Whether sums begin, and end, at this step.
    """

    batch: Any
    head: Any
    q_block: Any
    k_block: Any
    needed: Any
    is_first: Any
    is_last: Any


class GridOrder(ABC):
    """The steps of a grid, in order.

    Attributes
    ----------
    plan, heads
        The plan of the call, and its number of query heads.
    grid
        The shape of the grid.
    sequential
        How many of the last axes of the grid add to the same results.
    bounds
        The ranges of needed blocks, in one flat array.
    """

    plan: Plan
    heads: int
    grid: tuple[int, ...]
    sequential: ClassVar[int] = 1
    bounds: Array

    @abstractmethod
    def step(self, bounds: Any, *ids: Any) -> Step:
        """The step at some indices of the grid, reading its range from ``bounds``."""

    def table_row(self, step: Step) -> Any:
        """The first of the two rows of a table that a tile reads."""
        return self.plan.q_blocks - 1 + step.k_block - step.q_block


class QueryMajor(GridOrder):
    """For each block of queries, all blocks of keys."""

    def __init__(self, plan: Plan, operands: Operands, integers: Integers) -> None:
        self.plan, (batch, self.heads) = plan, operands.q.shape[:2]
        self.grid = (batch, self.heads, plan.q_blocks, plan.k_blocks)
        self.bounds = integers.key_ranges.reshape(-1)

    def step(self, bounds: Any, *ids: Any) -> Step:
        b, h, i, j = ids
        batch, heads, q_blocks, k_blocks = self.grid
        first, end = _range(bounds, (batch, heads, q_blocks), b, h, i)
        needed = (first <= j) & (j < end)
        return Step(b, h, i, _nearest(j, first, end), needed, j == 0, j == k_blocks - 1)


class KeyMajor(GridOrder):
    """For each block of keys, all blocks of queries."""

    def __init__(self, plan: Plan, operands: Operands, integers: Integers) -> None:
        self.plan, (batch, self.heads) = plan, operands.q.shape[:2]
        self.grid = (batch, self.heads, plan.k_blocks, plan.q_blocks)
        ranges = integers.query_ranges, integers.key_ranges
        self.bounds = jnp.concatenate([each.reshape(-1) for each in ranges])

    def step(self, bounds: Any, *ids: Any) -> Step:
        b, h, j, i = ids
        batch, heads, k_blocks, q_blocks = self.grid
        first, end = _range(bounds, (batch, heads, k_blocks), b, h, j)
        q_block = _nearest(i, first, end)
        low, high = _range(
            bounds, (batch, heads, q_blocks), b, h, q_block, start=2 * batch * heads * k_blocks
        )
        # The forward kernel computes no tile outside of the range of a query block.
        needed = (first <= i) & (i < end) & (low <= j) & (j < high)
        return Step(b, h, q_block, j, needed, i == 0, i == q_blocks - 1)

    def table_row(self, step: Step) -> Any:
        """As in ``GridOrder``, but of a flipped table."""
        return self.plan.k_blocks - 1 + step.q_block - step.k_block


class Diagonal(GridOrder):
    """For each diagonal of tiles, all batches, and in each all tiles of the diagonal."""

    sequential = 2

    def __init__(self, plan: Plan, operands: Operands, integers: Integers) -> None:
        self.plan, (self.batch, self.heads) = plan, operands.q.shape[:2]
        diagonals = plan.q_blocks + plan.k_blocks - 1
        self.grid = (self.heads, diagonals, self.batch, min(plan.q_blocks, plan.k_blocks))
        self.bounds = integers.key_ranges.reshape(-1)

    def step(self, bounds: Any, *ids: Any) -> Step:
        h, d, b, t = ids
        q_blocks, k_blocks = self.plan.q_blocks, self.plan.k_blocks
        ahead = d - (q_blocks - 1)
        i = t + jnp.maximum(-ahead, 0)
        exists = (i < q_blocks) & (i + ahead < k_blocks)
        i = jnp.where(exists, i, 0)
        first, end = _range(bounds, (self.batch, self.heads, q_blocks), b, h, i)
        needed = exists & (first <= i + ahead) & (i + ahead < end)
        is_first, is_last = (t == 0) & (b == 0), (t == self.grid[3] - 1) & (b == self.batch - 1)
        q_block, k_block = jnp.where(needed, i, 0), jnp.where(needed, i + ahead, 0)
        return Step(b, h, q_block, k_block, needed, is_first, is_last)


def _range(
    bounds: Any, shape: tuple[int, int, int], b: Any, h: Any, i: Any, start: int = 0
) -> tuple[Any, Any]:
    """First and end, from an array ``(2, *shape)`` that begins at ``bounds[start]``, flat."""
    batch, heads, count = shape
    at = start + (b * heads + h) * count + i
    return bounds[at], bounds[at + batch * heads * count]


def _nearest(j: Any, first: Any, end: Any) -> Any:
    """The needed block nearest to ``j``; block 0 if none is needed."""
    return jnp.minimum(jnp.maximum(j, first), jnp.maximum(end, 1) - 1)


def run_grid(
    kernel: Kernel,
    order: GridOrder,
    operands: Mapping[str, Array | None],
    results: Mapping[str, jax.ShapeDtypeStruct | None],
    scratch: Mapping[str, Any],
    *,
    interpreted: bool,
) -> dict[str, Array]:
    """Run a kernel over a grid.

    ``operands`` and ``results`` have these shapes: ``MATRICES`` are ``(B, heads, L, D)``.
    ``head_scalars`` are ``(1, H * P)``. Rows of a table are ``(H, rows, 1, n)``: a tile reads the
    two rows ``low`` and ``high``, and a diagonal writes the row ``line``. All others hold ``n``
    numbers per token, ``(B, heads or 1, n, L)``.
    """
    parallel = len(order.grid) - order.sequential
    semantics: list[Literal["parallel", "arbitrary"]] = ["parallel"] * parallel
    semantics += ["arbitrary"] * order.sequential
    call = pl.pallas_call(
        partial(_run_step, kernel, order),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=order.grid,
            in_specs=[{name: _spec(order, name, array) for name, array in operands.items()}],
            out_specs=[{name: _spec(order, name, shape) for name, shape in results.items()}],
            scratch_shapes=[dict(scratch)],
        ),
        out_shape=[dict(results)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=interpreted,
        name=f"posenc{kernel.__name__}",
    )
    outputs: dict[str, Array]
    (outputs,) = call(order.bounds, dict(operands))
    return outputs


def _run_step(
    kernel: Kernel, order: GridOrder, bounds: Any, ins: Refs, outs: Refs, scratch: Refs
) -> None:
    ids = [pl.program_id(axis) for axis in range(len(order.grid))]
    kernel(order, order.step(bounds, *ids), ins, outs, scratch)


def _spec(order: GridOrder, name: str, array: Any) -> Any:
    """Which block of an array a step gets."""
    if array is None:
        return None
    if name == "head_scalars":
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    heads, size = array.shape[1], order.plan.block

    def index(*args: Any) -> Any:
        *ids, bounds = args
        step = order.step(bounds, *ids)
        if name == "line":
            return ids[0], ids[1], 0, 0
        if name in ("low", "high"):
            return step.head, order.table_row(step) + (name == "high"), 0, 0
        block = step.k_block if name in PER_KEY else step.q_block
        head = step.head // (order.heads // heads)
        return (step.batch, head, block, 0) if name in MATRICES else (step.batch, head, 0, block)

    shape = array.shape[2:]
    if name in MATRICES:
        shape = size, array.shape[3]
    elif name not in ("line", "low", "high"):
        shape = array.shape[2], size
    return pl.BlockSpec((None, None, *shape), index)
