"""How kernels for TPUs walk over tiles: which blocks a step of a grid has, and what is fetched.

Numbers ``first .. end - 1`` of needed blocks arrive before a kernel starts and steer what is
fetched: steps before and after them stand where their neighbours stand, and fetch nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.fused.plan import Operands, Places, Plan

Refs = dict[str, Any]
Kernel = Callable[["Walk", "Spot", Refs, Refs, Refs], None]

VECTORS = ("q", "k", "v", "d_out", "out", "d_q", "d_k", "d_v")
OF_KEYS = ("k", "v", "k_pos", "k_seg", "k_feature", "d_k", "d_v", "d_k_feature")


class Spot(NamedTuple):
    """A step of a grid: its tile, whether that is needed, and where the step is in its walk."""

    batch: Any
    head: Any
    q_block: Any
    k_block: Any
    needed: Any
    is_first: Any
    is_last: Any


class Walk(Protocol):
    """The steps of a grid; results build up along so many of its last axes."""

    plan: Plan
    heads: int
    grid: tuple[int, ...]
    sequential: int
    bounds: Array

    def spot(self, bounds: Any, *ids: Any) -> Spot:
        """The step ``ids``, with ``bounds`` to be read."""

    def row_of_table(self, spot: Spot) -> Any:
        """The first of two rows of a table that a tile reads."""


class UnderQueries:
    """Under each block of queries the blocks of keys in turn."""

    sequential = 1

    def __init__(self, plan: Plan, operands: Operands, places: Places) -> None:
        self.plan, (batch, self.heads) = plan, operands.q.shape[:2]
        self.grid = (batch, self.heads, plan.q_blocks, plan.k_blocks)
        self.bounds = places.keys.reshape(-1)

    def spot(self, bounds: Any, *ids: Any) -> Spot:
        b, h, i, j = ids
        first, end = _range(bounds, self.grid[:3], b, h, i)
        needed = (first <= j) & (j < end)
        return Spot(b, h, i, _within(j, first, end), needed, j == 0, j == self.grid[3] - 1)

    def row_of_table(self, spot: Spot) -> Any:
        return self.plan.q_blocks - 1 + spot.k_block - spot.q_block


class UnderKeys:
    """Under each block of keys the blocks of queries in turn, if they need it."""

    sequential = 1

    def __init__(self, plan: Plan, operands: Operands, places: Places) -> None:
        self.plan, (batch, self.heads) = plan, operands.q.shape[:2]
        self.grid = (batch, self.heads, plan.k_blocks, plan.q_blocks)
        self.bounds = jnp.concatenate([places.queries.reshape(-1), places.keys.reshape(-1)])

    def spot(self, bounds: Any, *ids: Any) -> Spot:
        b, h, i, j = ids
        batch, heads, k_blocks, q_blocks = self.grid
        first, end = _range(bounds, (batch, heads, k_blocks), b, h, i)
        at = _within(j, first, end)
        low, high = _range(
            bounds, (batch, heads, q_blocks), b, h, at, start=2 * batch * heads * k_blocks
        )
        needed = (first <= j) & (j < end) & (low <= i) & (i < high)
        return Spot(b, h, at, i, needed, j == 0, j == q_blocks - 1)

    def row_of_table(self, spot: Spot) -> Any:
        return self.plan.k_blocks - 1 + spot.q_block - spot.k_block  # of a flipped one


class AlongDiagonals:
    """For each diagonal of tiles all batches, and the tiles of the diagonal in turn."""

    sequential = 2

    def __init__(self, plan: Plan, operands: Operands, places: Places) -> None:
        self.plan, (self.batch, self.heads) = plan, operands.q.shape[:2]
        diagonals = plan.q_blocks + plan.k_blocks - 1
        self.grid = (self.heads, diagonals, self.batch, min(plan.q_blocks, plan.k_blocks))
        self.bounds = places.keys.reshape(-1)

    def spot(self, bounds: Any, *ids: Any) -> Spot:
        h, d, b, t = ids
        q_blocks, k_blocks = self.plan.q_blocks, self.plan.k_blocks
        ahead = d - (q_blocks - 1)
        i = t + jnp.maximum(-ahead, 0)
        exists = (i < q_blocks) & (i + ahead < k_blocks)
        i = jnp.where(exists, i, 0)
        first, end = _range(bounds, (self.batch, self.heads, q_blocks), b, h, i)
        needed = exists & (first <= i + ahead) & (i + ahead < end)
        begins, ends = (t == 0) & (b == 0), (t == self.grid[3] - 1) & (b == self.batch - 1)
        q_block, k_block = jnp.where(needed, i, 0), jnp.where(needed, i + ahead, 0)
        return Spot(b, h, q_block, k_block, needed, begins, ends)

    def row_of_table(self, spot: Spot) -> Any:
        return self.plan.q_blocks - 1 + spot.k_block - spot.q_block


def _range(
    bounds: Any, shape: tuple[int, int, int], b: Any, h: Any, i: Any, start: int = 0
) -> tuple[Any, Any]:
    """First and end, from numbers ``(2, *shape)`` that lie flat from ``start`` on."""
    batch, heads, count = shape
    at = start + (b * heads + h) * count + i
    return bounds[at], bounds[at + batch * heads * count]


def _within(j: Any, first: Any, end: Any) -> Any:
    """The needed block next to ``j``; block 0 if none is."""
    return jnp.minimum(jnp.maximum(j, first), jnp.maximum(end, 1) - 1)


def launched(
    kernel: Kernel,
    walk: Walk,
    operands: dict[str, Array | None],
    results: dict[str, jax.ShapeDtypeStruct | None],
    scratch: dict[str, Any],
    *,
    interpreted: bool,
) -> dict[str, Array]:
    """A kernel run over a grid.

    ``operands`` and ``results`` are ``VECTORS (B, heads, L, D)`` or numbers of tokens
    ``(B, heads or 1, n, L)``; or ``numbers (1, H * P)``; or rows of a table ``(H, rows, 1, n)``, of
    which ``low`` and ``high`` are the two that a tile reads and ``line`` is one of a diagonal.
    """
    axes, alone = len(walk.grid), walk.sequential
    call = pl.pallas_call(
        partial(_step, kernel, walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=walk.grid,
            in_specs=[{name: _spec(walk, name, array) for name, array in operands.items()}],
            out_specs=[{name: _spec(walk, name, shape) for name, shape in results.items()}],
            scratch_shapes=[scratch],
        ),
        out_shape=[results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (axes - alone) + ("arbitrary",) * alone
        ),
        interpret=interpreted,
        name=f"posenc{kernel.__name__}",
    )
    (found,) = call(walk.bounds, operands)
    return found


def _step(kernel: Kernel, walk: Walk, bounds: Any, ins: Refs, outs: Refs, scratch: Refs) -> None:
    ids = [pl.program_id(axis) for axis in range(len(walk.grid))]
    kernel(walk, walk.spot(bounds, *ids), ins, outs, scratch)


def _spec(walk: Walk, name: str, array: Any) -> Any:
    """The block of a tile."""
    if array is None:
        return None
    if name == "numbers":
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    heads, size = array.shape[1], walk.plan.block

    def at(*args: Any) -> Any:
        *ids, bounds = args
        spot = walk.spot(bounds, *ids)
        if name == "line":
            return ids[0], ids[1], 0, 0
        if name in ("low", "high"):
            return spot.head, walk.row_of_table(spot) + (name == "high"), 0, 0
        block = spot.k_block if name in OF_KEYS else spot.q_block
        head = spot.head // (walk.heads // heads)
        return (spot.batch, head, block, 0) if name in VECTORS else (spot.batch, head, 0, block)

    cut = array.shape[2:]
    if name in VECTORS:
        cut = size, array.shape[3]
    elif name not in ("line", "low", "high"):
        cut = array.shape[2], size
    return pl.BlockSpec((None, None, *cut), at)
