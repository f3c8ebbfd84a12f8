"""What the kernels for Hopper GPUs read: arrays by name, and the blocks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.gradients import Rows
from posenc_jax.fused.mosaic_gpu.jax_version import OF_COLUMNS, OF_ROWS, plgpu
from posenc_jax.fused.mosaic_gpu.tile import (
    Side,
)
from posenc_jax.fused.plan import Operands, Places, Plan

QUERIES = ("q_pos", "q_seg", "q_feature")
KEYS = ("k_pos", "k_seg", "k_feature")
_OF_BATCH = ("q_pos", "q_seg", "k_pos", "k_seg")  # (B, L), not (B, H, L)


class Buffer(NamedTuple):
    """Shared memory for one block; a matrix lies as ``wgmma`` and its registers read fast."""

    shape: tuple[int, ...]
    dtype: Any

    def times(self, *count: int) -> Any:
        """So many of them."""
        columns = 128 // jnp.dtype(self.dtype).itemsize
        tiled = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
        transforms = tiled if len(self.shape) > 1 else ()
        return plgpu.SMEM((*count, *self.shape), self.dtype, transforms=transforms)


def arrays_of(
    plan: Plan, operands: Operands, places: Places, rows: Rows | None = None
) -> dict[str, Array]:
    """The arrays that there are, by name; a table is not among them."""
    found = {**operands._asdict(), **places._asdict(), **({} if rows is None else rows._asdict())}
    left_out = ("table",) if plan.form == "pairs" else ("table", "numbers")
    return {name: a for name, a in found.items() if a is not None and name not in left_out}


def present(names: Sequence[str], arrays: Mapping[str, Any]) -> list[str]:
    """Those of the names that are given."""
    return [name for name in names if name in arrays]


def buffers(names: Sequence[str], arrays: Mapping[str, Array], count: int) -> dict[str, Buffer]:
    """Room for ``count`` numbers of each vector."""
    return {name: Buffer((count,), arrays[name].dtype) for name in names}


class Program(NamedTuple):
    """One program of a grid of heads, blocks and batch.

    Attributes
    ----------
    refs
        Arrays in global memory.
    batch, head, heads
        Of queries, and how many there are.
    group
        Heads of queries that share one of keys.
    """

    refs: Mapping[str, Any]
    batch: Any
    head: Any
    heads: int
    group: int

    def matrix(self, name: str, start: Any, count: int) -> Any:
        """Rows of q, k, v or the gradient of the output."""
        head = self.head
        if name in ("k", "v"):
            head = lax.div(head, jnp.int32(self.group))
        return self.refs[name].at[self.batch, head, pl.ds(start, count)]

    def vector(self, name: str, start: Any, count: int) -> Any:
        """One number a query or key."""
        ref = self.refs[name].at[self.batch]
        return (ref if name in _OF_BATCH else ref.at[self.head]).at[pl.ds(start, count)]

    def matrices(self, name: str, first: Any, count: int) -> Callable[[Any], Any]:
        """Blocks of ``count`` rows by step."""
        return lambda step: self.matrix(name, first + step * count, count)

    def vectors(
        self, names: Sequence[str], first: Any, count: int
    ) -> dict[str, Callable[[Any], Any]]:
        """Blocks of ``count`` numbers by step."""

        def of(name: str) -> Callable[[Any], Any]:
            return lambda step: self.vector(name, first + step * count, count)

        return {name: of(name) for name in names}

    def tile(self, index: Any, name: str = "tiles") -> Any:
        """One tile of the table."""
        ref = self.refs[name]
        return ref.at[self.head * (ref.shape[0] // self.heads) + index]

    def tiles(self, start: Any, count: int) -> Any:
        """Tiles of the table, ``(H * m, n, n)`` because a copy has at most five axes."""
        ref = self.refs["tiles"]
        return ref.at[pl.ds(self.head * (ref.shape[0] // self.heads) + start, count)]

    def bounds(self, name: str, block: Any) -> tuple[Any, Any]:
        """First and end of the blocks that a block needs."""
        ref = self.refs[name]
        first, end = (ref[n, self.batch, self.head, block] for n in (0, 1))
        return first, end

    def numbers(self, plan: Plan) -> list[Any]:
        """Params of the bias for this head."""
        if plan.form != "pairs":
            return []
        count = len(plan.learned + plan.fixed)
        return [self.refs["numbers"][self.head, n] for n in range(count)]


def side(axis: int, start: Any, names: Sequence[str], loaded: Mapping[str, Any]) -> Side:
    """Queries or keys, from what is in shared memory of their positions, segments and feature."""
    layout = OF_COLUMNS if axis else OF_ROWS
    pos, seg, feature = (
        plgpu.load(loaded[name], layout=layout) if name in loaded else None for name in names
    )
    return Side(axis, start, pos, seg, feature)
