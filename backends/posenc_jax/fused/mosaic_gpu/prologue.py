"""How the kernels for Hopper GPUs begin: each keeps one side as rows, and streams the other.

A program takes a block of queries or of keys. Each warpgroup keeps 64 of its tokens in shared
memory: the rows of its tiles. Blocks of the other side arrive one after the other: the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.mosaic_gpu.jax_version import WGMMA, plgpu
from posenc_jax.fused.mosaic_gpu.operands import (
    MATRICES,
    PER_KEY,
    PER_QUERY,
    Buffer,
    Program,
    buffer_for,
    load_logsumexp,
    load_side,
    named_arrays,
    present,
)
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, Stream, fetch, ring_buffer
from posenc_jax.fused.mosaic_gpu.tile import (
    ROWS,
    Bias,
    Shape,
    TileSide,
    bias_function,
    row_term,
    zeros,
)
from posenc_jax.fused.mosaic_gpu.toeplitz import (
    first_table_tile,
    tiles_for_keys,
    tiles_for_queries,
)
from posenc_jax.fused.plan import Integers, Operands, Plan


class Scratch(NamedTuple):
    """Shared memory and barriers of a kernel, which lie in memory in this order.

    Streams come before rows, because every step computes their addresses. At head_dim 128 the
    backward kernels then take up to 29 registers less than with rows first; at 64, 6 more to 4
    less. What only one kernel needs is small, and comes first: after the rows, the gradients of
    keys with a feature spill 2 registers.

    Attributes
    ----------
    own
        By name, what only this kernel needs.
    streams
        As ``ring_buffer`` makes them, one per stream.
    rows, rows_arrived
        By name, what each warpgroup keeps; a barrier for it.
    interpreter
        As ``plus_product`` takes it, per warpgroup.
    """

    own: Any
    streams: Any
    rows: Any
    rows_arrived: Any
    interpreter: Any


class Arrangement(NamedTuple):
    """Which arrays a kernel keeps, and which it streams.

    Attributes
    ----------
    plan
        The plan of the call.
    arrays
        All arrays by name; ``tiles`` are those of a table.
    over
        The side that streams.
    columns
        Tokens per step of that side.
    rows
        Names of the arrays that a warpgroup keeps.
    streams
        Names of the arrays that arrive together, per stream.
    """

    plan: Plan
    arrays: dict[str, Array]
    over: Literal["queries", "keys"]
    columns: int
    rows: tuple[str, ...]
    streams: tuple[tuple[str, ...], ...]

    @property
    def grid(self) -> dict[str, int]:
        """The axes of the grid of programs."""
        batch, _, heads, _ = self.arrays["q"].shape
        blocks = self.plan.q_blocks if self.over == "keys" else self.plan.k_blocks
        return {"head": heads, "block": blocks, "batch": batch}

    def scratch(self, own: Mapping[str, Any], *, interpreted: bool) -> Scratch:
        """The types of the scratch of a kernel, with its ``own``."""
        rows = {name: buffer_for(name, self.arrays, ROWS) for name in self.rows}
        tile = Buffer((ROWS, self.columns), self.arrays["q"].dtype)
        return Scratch(
            streams=[
                ring_buffer({name: self._block(name) for name in names}) for names in self.streams
            ],
            rows={name: buffer.scratch(WARPGROUPS) for name, buffer in rows.items()},
            rows_arrived=plgpu.Barrier(num_arrivals=len(rows), num_barriers=WARPGROUPS),
            own=dict(own),
            interpreter=tile.scratch(WARPGROUPS) if interpreted else None,
        )

    def _block(self, name: str) -> Buffer:
        if name == "tiles":
            return Buffer((WARPGROUPS, ROWS, ROWS), jnp.float32)
        return buffer_for(name, self.arrays, self.columns)


def arrange(
    plan: Plan,
    operands: Operands,
    integers: Integers,
    residuals: Residuals | None = None,
    *,
    over: Literal["queries", "keys"],
    columns: int,
    rows: tuple[str, ...],
    streams: tuple[tuple[str, ...], ...],
) -> Arrangement:
    """An arrangement of the arrays that a call has, out of those that it may have.

    The tiles of a table have a stream of their own, which has the steps of near tiles only.
    """
    arrays = named_arrays(plan, operands, integers, residuals)
    if operands.table is not None:
        tiles = tiles_for_queries if over == "keys" else tiles_for_keys
        arrays["tiles"] = tiles(operands.table)
        streams = (*streams, ("tiles",))
    streams = tuple(names for each in streams if (names := present(each, arrays)))
    return Arrangement(plan, arrays, over, columns, present(rows, arrays), streams)


class Loop(NamedTuple):
    """The loop of one warpgroup, ready to run.

    Attributes
    ----------
    arrangement, program, warpgroup
        What it is made from.
    start
        Index of the first row.
    first
        Index of the first token that streams.
    rows
        The kept arrays, by name, in shared memory.
    steps
        How many blocks stream.
    near
        First and end of the steps whose tiles are near.
    streams
        One for each of ``arrangement.streams``, begun.
    head_scalars, far
        The scalars of the bias for this head; its biases of far tiles.
    interpreter_scratch
        As ``plus_product`` takes it.
    """

    arrangement: Arrangement
    program: Program
    warpgroup: Any
    start: Any
    first: Any
    rows: Mapping[str, Any]
    steps: Any
    near: tuple[Any, Any]
    streams: tuple[Stream, ...]
    head_scalars: list[Any]
    far: list[Any]
    interpreter_scratch: Any

    def row_side(self) -> TileSide:
        """The tokens of the rows, loaded into registers."""
        plan = self.arrangement.plan
        if self.arrangement.over == "keys":
            return load_side(0, self.start + plan.k_len - plan.q_len, PER_QUERY, self.rows)
        return load_side(0, self.start, PER_KEY, self.rows)

    def column_side(self, step: Any, blocks: Mapping[str, Any], at: int = 0) -> TileSide:
        """The tokens of the columns from the one ``at``, loaded into registers."""
        plan, start = self.arrangement.plan, self.first + step * self.arrangement.columns + at
        if self.arrangement.over == "keys":
            return load_side(1, start, PER_KEY, blocks)
        return load_side(1, start + plan.k_len - plan.q_len, PER_QUERY, blocks)

    def is_near(self, step: Any) -> Any:
        """Whether a tile of the table has the bias of a step."""
        return (self.near[0] <= step) & (step < self.near[1])

    def far_side(self, step: Any) -> Any:
        """The column of ``Operands.far`` that a far step reads."""
        later = (step >= self.near[1]).astype(jnp.int32)
        return later if self.arrangement.over == "keys" else 1 - later

    def bias(self, step: Any, shape: Shape) -> Bias:
        """The bias of a tile, as ``masked_scores`` takes it.

        Far tiles are a branch, not a loop: two loops have so many constants that keys spill.
        """
        plan = self.arrangement.plan
        if plan.form != "by distance":
            return bias_function(plan, self.head_scalars)

        def from_table() -> Array:
            over_keys = self.arrangement.over == "keys"
            index = WARPGROUPS - 1 - self.warpgroup if over_keys else self.warpgroup
            tiles = self.streams[-1].wait(step)["tiles"]
            tile: Array = plgpu.load(tiles.at[index], layout=WGMMA)
            return tile

        def constant() -> Array:
            return zeros(*shape) + jnp.where(self.far_side(step) == 0, self.far[0], self.far[1])

        if not plan.has_far:
            return from_table()
        bias: Array = lax.cond(self.is_near(step), from_table, constant)
        return bias

    def row_term(self) -> Array | None:
        """What the bias leaves out of all scores of a query, as ``tile.row_term``."""
        over_keys, columns = self.arrangement.over == "keys", self.arrangement.columns
        axis, count = (0, ROWS) if over_keys else (1, columns)
        return row_term(self.arrangement.plan, self.head_scalars, axis, count)

    def logsumexp(self, loaded: Mapping[str, Any]) -> Array:
        """The log-sum-exp of queries, of scores with this bias, in units of ``ln 2``."""
        logsumexp = load_logsumexp(loaded, 0 if self.arrangement.over == "keys" else 1)
        left_out = self.row_term()
        return logsumexp if left_out is None else logsumexp - left_out

    def release_bias(self, step: Any) -> None:
        """End the reads of a tile of the table. Earlier than with keys, it takes registers."""
        if self.arrangement.plan.form == "by distance":
            pl.when(self.is_near(step))(lambda: self.streams[-1].release(step))


def prologue(
    arrangement: Arrangement, warpgroup: Any, refs: Mapping[str, Any], scratch: Scratch
) -> Loop:
    """Find the blocks that a program needs, begin its streams, and fetch its rows."""
    plan, columns = arrangement.plan, arrangement.columns
    heads, kv_heads = (arrangement.arrays[name].shape[2] for name in ("q", "k"))
    program = Program(
        refs, lax.axis_index("batch"), lax.axis_index("head"), heads, heads // kv_heads
    )
    block = lax.axis_index("block")
    if plan.causal and arrangement.over == "keys":  # the longest programs begin first
        block = plan.q_blocks - 1 - block
    ranges = "key_ranges" if arrangement.over == "keys" else "query_ranges"
    first, end = program.range_of(ranges, block)
    per_block = plan.block // columns
    near = _near_steps(arrangement, block, first, end, per_block)
    steps, first = (end - first) * per_block, first * plan.block

    def source(name: str) -> Callable[[Any], Any]:
        if name == "tiles":
            return _table_tiles(arrangement, program, block, first)
        return program.blocks(name, first, columns)

    streams = tuple(
        Stream(
            {name: source(name) for name in names},
            *(near if "tiles" in names else (jnp.int32(0), steps)),
            warpgroup,
            not set(names) <= set(MATRICES),
            *buffers,
        )
        for names, buffers in zip(arrangement.streams, scratch.streams, strict=True)
    )
    start = block * plan.block + warpgroup * ROWS
    rows = {name: buffer.at[warpgroup] for name, buffer in scratch.rows.items()}
    copies = [(program.tokens(name, start, ROWS), rows[name]) for name in arrangement.rows]

    def begin_streams() -> None:
        for stream in streams:
            stream.begin()

    fetch(copies, scratch.rows_arrived.at[warpgroup], meanwhile=begin_streams)
    return Loop(
        arrangement=arrangement,
        program=program,
        warpgroup=warpgroup,
        start=start,
        first=first,
        rows=rows,
        steps=steps,
        near=near,
        streams=streams,
        head_scalars=program.head_scalars(plan),
        far=[refs["far"][program.head, n] for n in (0, 1)] if plan.has_far else [],
        interpreter_scratch=(
            None if scratch.interpreter is None else scratch.interpreter.at[warpgroup]
        ),
    )


def _near_steps(
    arrangement: Arrangement, block: Any, first: Any, end: Any, per_block: int
) -> tuple[Any, Any]:
    """First and end of the near steps, of those for the blocks ``first`` to ``end - 1``."""
    plan = arrangement.plan
    near = (plan.near_keys if arrangement.over == "keys" else plan.near_queries)(block)
    has_earlier, has_later = plan.has_far_before, plan.has_far_after
    if arrangement.over == "queries":
        has_earlier, has_later = has_later, has_earlier
    near_first = lax.clamp(first, near[0], end) if has_earlier else first
    near_end = lax.clamp(near_first, near[1], end) if has_later else end
    return (near_first - first) * per_block, (near_end - first) * per_block


def _table_tiles(
    arrangement: Arrangement, program: Program, block: Any, first: Any
) -> Callable[[Any], Any]:
    """A function from a near step to the tiles of the table for all warpgroups."""
    start, origin = block * arrangement.plan.block, first_table_tile(arrangement.plan)

    def over_keys(step: Any) -> Any:
        before = lax.div(first - start, jnp.int32(ROWS)) - WARPGROUPS
        return program.table_tiles(before + step - (origin - 1), WARPGROUPS)

    def over_queries(step: Any) -> Any:
        before = lax.div(start - first, jnp.int32(ROWS)) - 1
        return program.table_tiles(before - step - (origin - 1), WARPGROUPS)

    return over_keys if arrangement.over == "keys" else over_queries
