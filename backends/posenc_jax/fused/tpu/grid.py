"""The order in which kernels for TPUs visit tiles: which blocks a step has, and what it fetches.

The ranges ``first .. end - 1`` of needed blocks are prefetched scalars, which the index maps read.
A step is not free even if it does nothing. So the last axis of a grid is as long as needed, a
traced number: it joins the heads, and each has the steps of its longest range. A head whose bias
decays fast takes few. A step after the end of its range takes the index of the last block. Pallas
fetches a block only if its index changes, so this step fetches nothing.
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

from posenc_jax.fused.plan import Integers, Plan

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
        The shape of the grid; one axis is as long as the needed blocks ask for, a traced number.
    sequential
        How many of the last axes of the grid add to the same results.
    prefetched
        Integers that say which blocks a step has, each array flat.
    """

    plan: Plan
    heads: int
    grid: tuple[Any, ...]
    sequential: ClassVar[int] = 1
    prefetched: dict[str, Array]

    @abstractmethod
    def step(self, prefetched: Refs, *ids: Any) -> Step:
        """The step at some indices of the grid."""

    def table_row(self, step: Step) -> Any:
        """The first of the two rows of a table that a tile reads; of a far tile, that of a near."""
        first, end = self.plan.near
        return jnp.clip(step.k_block - step.q_block - first, 0, end - first - 1)


class QueryMajor(GridOrder):
    """For each block of queries, all heads, and for each its range of blocks of keys."""

    def __init__(self, plan: Plan, integers: Integers) -> None:
        self.plan, (self.batch, self.heads) = plan, integers.key_ranges.shape[1:3]
        steps, walk = _walk_heads(integers.key_ranges, plan.k_blocks)
        self.grid = (self.batch, plan.q_blocks, steps)
        self.prefetched = {**walk, "key_ranges": integers.key_ranges.reshape(-1)}

    def step(self, prefetched: Refs, *ids: Any) -> Step:
        b, i, n = ids
        h, n = prefetched["head"][n], prefetched["place"][n]
        shape = self.batch, self.heads, self.plan.q_blocks
        first, end = _range(prefetched["key_ranges"], shape, b, h, i)
        k_block, in_range, is_last = _block_at(n, first, end)
        return Step(b, h, i, k_block, in_range, n == 0, is_last)


class KeyMajor(GridOrder):
    """For each block of keys, all heads, and for each its range of blocks of queries."""

    def __init__(self, plan: Plan, integers: Integers) -> None:
        self.plan, (self.batch, self.heads) = plan, integers.key_ranges.shape[1:3]
        steps, walk = _walk_heads(integers.query_ranges, plan.q_blocks)
        self.grid = (self.batch, plan.k_blocks, steps)
        ranges = {name: getattr(integers, name) for name in ("query_ranges", "key_ranges")}
        self.prefetched = {**walk, **{name: each.reshape(-1) for name, each in ranges.items()}}

    def step(self, prefetched: Refs, *ids: Any) -> Step:
        b, j, n = ids
        h, n = prefetched["head"][n], prefetched["place"][n]
        shape = self.batch, self.heads, self.plan.k_blocks
        first, end = _range(prefetched["query_ranges"], shape, b, h, j)
        q_block, in_range, is_last = _block_at(n, first, end)
        shape = self.batch, self.heads, self.plan.q_blocks
        low, high = _range(prefetched["key_ranges"], shape, b, h, q_block)
        # The forward kernel computes no tile outside of the range of a query block.
        needed = in_range & (low <= j) & (j < high)
        return Step(b, h, q_block, j, needed, n == 0, is_last)

    def table_row(self, step: Step) -> Any:
        """As in ``GridOrder``, but of a flipped table."""
        first, end = self.plan.near
        return end - first - 1 - super().table_row(step)


class Diagonal(GridOrder):
    """For each near diagonal with a needed tile, all batches, and in each its tiles.

    These diagonals are ``first`` and the next ones, ``count`` in all, where 0 is the first near
    diagonal of the plan.
    """

    sequential = 2

    def __init__(self, plan: Plan, integers: Integers) -> None:
        self.plan, (self.batch, self.heads) = plan, integers.key_ranges.shape[1:3]
        first, end = integers.key_ranges
        near, near_end = plan.near
        q_block = jnp.arange(plan.q_blocks, dtype=jnp.int32)
        lowest = jnp.min(jnp.where(first < end, first - q_block, near_end - 1))
        highest = jnp.max(jnp.where(first < end, end - 1 - q_block, near))
        self.first, last = (jnp.clip(d, near, near_end - 1) - near for d in (lowest, highest))
        self.count = jnp.maximum(last + 1 - self.first, 1)
        self.grid = (self.heads, self.count, self.batch, min(plan.q_blocks, plan.k_blocks))
        self.prefetched = {
            "key_ranges": integers.key_ranges.reshape(-1),
            "first": self.first.reshape(1),
        }

    def visited(self) -> Array:
        """Which near diagonals these are; nothing is written for the others."""
        first, end = self.plan.near
        after = jnp.arange(end - first) - self.first
        return (after >= 0) & (after < self.count)

    @staticmethod
    def diagonal(prefetched: Refs, *ids: Any) -> Any:
        """Which diagonal a step is on."""
        return prefetched["first"][0] + ids[1]

    def step(self, prefetched: Refs, *ids: Any) -> Step:
        h, _, b, t = ids
        q_blocks, k_blocks = self.plan.q_blocks, self.plan.k_blocks
        ahead = self.diagonal(prefetched, *ids) + self.plan.near[0]
        i = t + jnp.maximum(-ahead, 0)
        exists = (i < q_blocks) & (i + ahead < k_blocks)
        i = jnp.where(exists, i, 0)
        shape = self.batch, self.heads, q_blocks
        first, end = _range(prefetched["key_ranges"], shape, b, h, i)
        needed = exists & (first <= i + ahead) & (i + ahead < end)
        is_first, is_last = (t == 0) & (b == 0), (t == self.grid[3] - 1) & (b == self.batch - 1)
        q_block, k_block = jnp.where(needed, i, 0), jnp.where(needed, i + ahead, 0)
        return Step(b, h, q_block, k_block, needed, is_first, is_last)


def _range(ranges: Any, shape: tuple[int, int, int], b: Any, h: Any, i: Any) -> tuple[Any, Any]:
    """First and end, from an array ``(2, *shape)``, flat."""
    batch, heads, count = shape
    at = (b * heads + h) * count + i
    return ranges[at], ranges[at + batch * heads * count]


def _walk_heads(ranges: Array, blocks: int) -> tuple[Array, dict[str, Array]]:
    """The number of steps of all heads, and of each step its head and its place in its range.

    A head has as many steps as its longest range has blocks. It has at least one, because a result
    to which no tile adds is written, too. All integers have 32 bits, as a grid demands.
    """
    heads = ranges.shape[2]
    lengths = jnp.max(ranges[1] - ranges[0], axis=(0, 2), initial=1)
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    head = jnp.repeat(
        jnp.arange(heads, dtype=jnp.int32), lengths, total_repeat_length=heads * blocks
    )
    place = jnp.arange(heads * blocks, dtype=jnp.int32) - (ends - lengths)[head]
    return ends[-1], {"head": head, "place": place}


def _block_at(n: Any, first: Any, end: Any) -> tuple[Any, Any, Any]:
    """The block at place ``n`` of a range, whether it is in the range, and whether it is the last.

    After the end it stays at the last block. An empty range has one place, at any block.
    """
    block = jnp.minimum(first + n, jnp.maximum(end, 1) - 1)
    return block, n < end - first, n == jnp.maximum(end - first, 1) - 1


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
    ``head_scalars`` are ``(1, H * P)``, and ``far`` is ``(1, H * 2)``. Rows of a table are
    ``(H, rows, 1, n)``: a tile reads the two rows ``low`` and ``high``, and a diagonal writes the
    row ``line``. All others hold ``n`` numbers per token, ``(B, heads or 1, n, L)``.
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
    (outputs,) = call(order.prefetched, dict(operands))
    return outputs


def _run_step(
    kernel: Kernel, order: GridOrder, prefetched: Refs, ins: Refs, outs: Refs, scratch: Refs
) -> None:
    ids = [pl.program_id(axis) for axis in range(len(order.grid))]
    kernel(order, order.step(prefetched, *ids), ins, outs, scratch)


def _spec(order: GridOrder, name: str, array: Any) -> Any:
    """Which block of an array a step gets."""
    if array is None:
        return None
    if name in ("head_scalars", "far"):
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    heads, size = array.shape[1], order.plan.block

    def index(*args: Any) -> Any:
        *ids, prefetched = args
        step = order.step(prefetched, *ids)
        if name == "line":
            assert isinstance(order, Diagonal)
            return step.head, order.diagonal(prefetched, *ids), 0, 0
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
