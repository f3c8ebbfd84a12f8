"""How the kernels for Hopper GPUs begin: each keeps one side as rows, and streams the other.

A program takes a block of queries or of keys. Each warpgroup keeps 64 of its tokens in shared
memory: the rows of its tiles. Blocks of the other side arrive one after the other: the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.mosaic_gpu.jax_version import WGMMA, plgpu
from posenc_jax.fused.mosaic_gpu.operands import (
    MATRICES,
    PER_KEY,
    PER_QUERY,
    Buffer,
    Program,
    buffer_for,
    load_side,
    named_arrays,
    present,
)
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, Stream, fetch, ring_buffer
from posenc_jax.fused.mosaic_gpu.tile import ROWS, Bias, TileSide, bias_function
from posenc_jax.fused.mosaic_gpu.toeplitz import tiles_for_keys, tiles_for_queries
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
    """An arrangement of the arrays that a call has, out of those that it may have."""
    arrays = named_arrays(plan, operands, integers, residuals)
    if operands.table is not None:
        tiles = tiles_for_queries if over == "keys" else tiles_for_keys
        arrays["tiles"] = tiles(operands.table)
    streams = tuple(present(names, arrays) for names in streams)
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
    streams
        One for each of ``arrangement.streams``, begun.
    head_scalars
        The scalars of the bias for this head.
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
    streams: tuple[Stream, ...]
    head_scalars: list[Any]
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

    def bias(self, blocks: Mapping[str, Any]) -> Bias:
        """The bias of a tile, as ``masked_scores`` takes it."""
        if "tiles" not in blocks:
            return bias_function(self.arrangement.plan, self.head_scalars)
        over_keys = self.arrangement.over == "keys"
        index = WARPGROUPS - 1 - self.warpgroup if over_keys else self.warpgroup
        tile: Array = plgpu.load(blocks["tiles"].at[index], layout=WGMMA)
        return tile


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
    steps, first = (end - first) * (plan.block // columns), first * plan.block

    def source(name: str) -> Callable[[Any], Any]:
        if name == "tiles":
            return _table_tiles(arrangement, program, block, first)
        return program.blocks(name, first, columns)

    streams = tuple(
        Stream(
            {name: source(name) for name in names},
            steps,
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
        streams=streams,
        head_scalars=program.head_scalars(plan),
        interpreter_scratch=(
            None if scratch.interpreter is None else scratch.interpreter.at[warpgroup]
        ),
    )


def _table_tiles(
    arrangement: Arrangement, program: Program, block: Any, first: Any
) -> Callable[[Any], Any]:
    """A function from a step to the tiles of the table for all warpgroups."""
    start, q_tiles = block * arrangement.plan.block, arrangement.arrays["q"].shape[1] // ROWS

    def over_keys(step: Any) -> Any:
        before = lax.div(first - start, jnp.int32(ROWS)) - WARPGROUPS
        return program.table_tiles(q_tiles + before + step, WARPGROUPS)

    def over_queries(step: Any) -> Any:
        before = lax.div(start - first, jnp.int32(ROWS)) - 1
        return program.table_tiles(q_tiles + before - step, WARPGROUPS)

    return over_keys if arrangement.over == "keys" else over_queries
