"""What the kernels for Hopper GPUs read: arrays by name, and blocks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.mosaic_gpu.jax_version import COLUMN_LAYOUT, ROW_LAYOUT, plgpu
from posenc_jax.fused.mosaic_gpu.tile import LOG2E, TileSide
from posenc_jax.fused.plan import Integers, Operands, Plan

MATRICES = ("q", "k", "v", "d_out", "out", "d_q", "d_k", "d_v")  # (B, L, H, D)
PER_QUERY = ("q_pos", "q_seg", "q_feature")
PER_KEY = ("k_pos", "k_seg", "k_feature")
STATISTICS = ("logsumexp", "delta")  # per query, for a backward pass
_WITHOUT_HEADS = ("q_pos", "q_seg", "k_pos", "k_seg")  # (B, L), not (B, H, L)


class Buffer(NamedTuple):
    """Shared memory for one block; a matrix is laid out for ``wgmma`` and for fast reads."""

    shape: tuple[int, ...]
    dtype: Any

    def scratch(self, *count: int) -> Any:
        """The scratch type of ``count`` such buffers."""
        columns = 128 // jnp.dtype(self.dtype).itemsize
        tiled = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
        transforms = tiled if len(self.shape) > 1 else ()
        return plgpu.SMEM((*count, *self.shape), self.dtype, transforms=transforms)


def named_arrays(
    plan: Plan, operands: Operands, integers: Integers, residuals: Residuals | None = None
) -> dict[str, Array]:
    """The arrays of a call by name, without the table; the log-sum-exp in units of ``ln 2``.

    Matrices are ``(B, L, H, D)``, as callers have them: XLA then moves none in memory before or
    after a kernel.
    """
    arrays = {**operands._asdict(), **integers._asdict()}
    if residuals is not None:
        arrays |= residuals._replace(logsumexp=residuals.logsumexp * LOG2E)._asdict()
    unused = ("table",) if plan.form == "elementwise" else ("table", "head_scalars")
    return {
        name: swap_heads(array) if name in MATRICES else array
        for name, array in arrays.items()
        if array is not None and name not in unused
    }


def swap_heads(matrix: Array) -> Array:
    """``(B, H, L, D)`` as ``(B, L, H, D)``, and the reverse."""
    return jnp.swapaxes(matrix, 1, 2)


def present(names: Iterable[str], arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that ``arrays`` has."""
    return tuple(name for name in names if name in arrays)


def buffer_for(name: str, arrays: Mapping[str, Array], count: int) -> Buffer:
    """Shared memory for ``count`` tokens of an array."""
    array = arrays[name]
    return Buffer((count, *array.shape[3:]) if name in MATRICES else (count,), array.dtype)


class Program(NamedTuple):
    """One program of a grid of heads, blocks and batch.

    Attributes
    ----------
    refs
        Arrays in global memory.
    batch, head
        Indices of this program; ``head`` is one of the queries.
    heads
        The number of heads of the queries.
    group
        How many heads of queries share a head of keys.
    """

    refs: Mapping[str, Any]
    batch: Any
    head: Any
    heads: int
    group: int

    def tokens(self, name: str, start: Any, count: int) -> Any:
        """``count`` tokens of a matrix or a vector."""
        if name not in MATRICES:
            ref = self.refs[name].at[self.batch]
            return (ref if name in _WITHOUT_HEADS else ref.at[self.head]).at[pl.ds(start, count)]
        head = self.head
        if name in ("k", "v"):
            head = lax.div(head, jnp.int32(self.group))
        return self.refs[name].at[self.batch, pl.ds(start, count), head]

    def blocks(self, name: str, first: Any, count: int) -> Callable[[Any], Any]:
        """A function from a step to its block of ``count`` tokens."""
        return lambda step: self.tokens(name, first + step * count, count)

    def table_tile(self, index: Any, name: str = "tiles") -> Any:
        """One tile of the table."""
        ref = self.refs[name]
        return ref.at[self.head * (ref.shape[0] // self.heads) + index]

    def table_tiles(self, start: Any, count: int) -> Any:
        """Tiles of the table, which is ``(H * m, n, n)`` because a copy has at most five axes."""
        ref = self.refs["tiles"]
        return ref.at[pl.ds(self.head * (ref.shape[0] // self.heads) + start, count)]

    def range_of(self, name: str, block: Any) -> tuple[Any, Any]:
        """First and end of the blocks that a block needs."""
        ref = self.refs[name]
        first, end = (ref[n, self.batch, self.head, block] for n in (0, 1))
        return first, end

    def head_scalars(self, plan: Plan) -> list[Any]:
        """The scalars of the bias for this head."""
        if plan.form != "elementwise":
            return []
        return [self.refs["head_scalars"][self.head, n] for n in range(len(plan.reads.scalars))]


def load_side(axis: int, start: Any, names: Sequence[str], loaded: Mapping[str, Any]) -> TileSide:
    """Queries or keys, from their positions, segments and feature in shared memory."""
    pos, seg, feature = (_load(loaded[name], axis) if name in loaded else None for name in names)
    return TileSide(axis, start, pos, seg, feature)


def load_logsumexp(loaded: Mapping[str, Any], axis: int) -> Array:
    """The log-sum-exp of queries that lie along an axis of a tile, in units of ``ln 2``."""
    return _load(loaded["logsumexp"], axis)


def load_delta(loaded: Mapping[str, Any], axis: int) -> Array:
    """``Residuals.delta`` of queries that lie along an axis of a tile."""
    return _load(loaded["delta"], axis)


def _load(ref: Any, axis: int) -> Array:
    values: Array = plgpu.load(ref, layout=COLUMN_LAYOUT if axis else ROW_LAYOUT)
    return values
