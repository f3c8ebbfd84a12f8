"""How a call is split into blocks of queries and of keys, and which pairs of blocks are visible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc.backend import (
    Call,
    Mask,
    PositionScheme,
    may_have_negligible_blocks,
)

_block_size = ContextVar("block_size", default=256)

# With fewer blocks of keys there is little to skip: at L=1024, four of them, ALiBi's step gains an
# eighth and compiles for three quarters longer. And wide tiles hold much that is masked.
_FEWEST_BLOCKS = 8

# A tile has one block of one side and as many of the other, unless there are few: some versions of
# XLA leave products of 256 by 256 to one thread of a CPU.
_WIDTH = 2

# Tiles of one head and one sequence side by side.
_LANES = 8

Index: TypeAlias = int | Array
Terms: TypeAlias = tuple[tuple[str, PositionScheme], ...]  # as ``scheme.bias_terms()``


@contextmanager
def block_size(size: int) -> Iterator[None]:
    """Use blocks of about ``size`` tokens, so that short sequences have several."""
    token = _block_size.set(size)
    try:
        yield
    finally:
        _block_size.reset(token)


def most_queries() -> int:
    """The most queries of a block."""
    return _block_size.get()


@dataclass(frozen=True)
class Tiling:
    """The static part of a call. A tile is a block of queries against ``k_width`` blocks of keys.

    In the backward pass it is ``q_width`` blocks of queries against a block of keys. Blocks of
    padding follow the last, so that a tile may begin at each block.

    Attributes
    ----------
    scheme, scale, softcap, mask, dtype, aligned
        As in ``posenc.attn.call.Call``; ``mask`` has no array. With aligned positions the
        index of a tile gives its positions.
    has_table
        Whether the bias, or some terms of it, are a table by distance, the learned array ``TABLE``.
    by_pair
        The terms of the bias that a tile computes; all of them as one without a table.
    q_len, k_len, q_block, k_block
        Lengths of q and k, and of their blocks; the last block may be padded.
    heads
        How many heads have tiles of their own; 1 where a tile has all heads.
    skips
        Whether negligible blocks are skipped. Then each head has its own tiles, and blocks of q and
        k have one size, unless all of q is shorter.
    """

    scheme: PositionScheme
    scale: float
    softcap: float | None
    mask: Mask
    dtype: Any
    aligned: bool
    has_table: bool
    by_pair: Terms
    q_len: int
    k_len: int
    q_block: int
    k_block: int
    heads: int
    skips: bool

    def lanes(self, batch: int) -> int:
        """How many tiles are computed side by side."""
        return max(1, min(self.heads, _LANES // batch))

    @property
    def q_block_count(self) -> int:
        """Number of blocks of queries."""
        return -(-self.q_len // self.q_block)

    @property
    def k_block_count(self) -> int:
        """Number of blocks of keys."""
        return -(-self.k_len // self.k_block)

    @property
    def q_width(self) -> int:
        """How many blocks of queries a tile has in the backward pass."""
        return _WIDTH if self.q_block_count >= _FEWEST_BLOCKS else 1

    @property
    def k_width(self) -> int:
        """How many blocks of keys a tile has in the forward pass."""
        return _WIDTH if self.k_block_count >= _FEWEST_BLOCKS else 1

    @property
    def padding(self) -> tuple[int, int]:
        """How many queries and how many keys are padding."""
        q_blocks = self.q_block_count + self.q_width - 1
        k_blocks = self.k_block_count + self.k_width - 1
        return q_blocks * self.q_block - self.q_len, k_blocks * self.k_block - self.k_len

    def valid_keys(self) -> Array | None:
        """Which keys are not padding, ``(n, 1, 1, bk)``; None without padding."""
        if not self.padding[1]:
            return None
        valid = jnp.arange(self.k_len + self.padding[1]) < self.k_len
        return valid.reshape(-1, 1, 1, self.k_block)

    def key_blocks(self, i: Index) -> tuple[Index, Index]:
        """Key blocks ``first .. end - 1`` hold all keys that query block ``i`` may see."""
        back, ahead = self._visible_offsets()
        start = self.k_len - self.q_len + i * self.q_block
        low = None if back is None else start - back
        high = None if ahead is None else start + self.q_block - 1 + ahead
        return _block_bounds(low, high, self.k_block, self.k_block_count)

    def query_blocks(self, j: Index) -> tuple[Index, Index]:
        """Query blocks ``first .. end - 1`` hold all queries that may see key block ``j``."""
        back, ahead = self._visible_offsets()
        start = j * self.k_block - (self.k_len - self.q_len)
        low = None if ahead is None else start - ahead
        high = None if back is None else start + self.k_block - 1 + back
        return _block_bounds(low, high, self.q_block, self.q_block_count)

    def _visible_offsets(self) -> tuple[int | None, int | None]:
        """How far back and how far ahead a query sees; None for no limit."""
        if not self.aligned:
            return None, None
        # A wider window has no effect, and its sum with an index may not fit 32 bits.
        longest = max(self.q_len, self.k_len)
        back, ahead = (None if side is None else min(side, longest) for side in self.mask.offsets())
        return back, ahead


def make_tiling(call: Call, *, has_table: bool = False, by_pair: Terms = ()) -> Tiling:
    """How a call is split into tiles."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    q_block, k_block = _even_block_size(q_len), _even_block_size(k_len)
    # Each head needs its own blocks, so heads are separate: right for a processor, but on a GPU or
    # a TPU a tile of one head is little work.
    skips = (
        call.skip_blocks
        and -(-k_len // k_block) >= _FEWEST_BLOCKS
        and may_have_negligible_blocks(call)
        and jax.default_backend() == "cpu"
    )
    if skips:  # what is negligible is known for blocks of one size
        size = q_block if q_block < q_len else -(-max(q_block, k_block) // 8) * 8
        q_block, k_block = min(q_len, size), size
    return Tiling(
        scheme=call.scheme,
        scale=call.scale,
        softcap=call.softcap,
        mask=call.mask,
        dtype=call.dtype,
        aligned=call.aligned,
        has_table=has_table,
        by_pair=by_pair,
        q_len=q_len,
        k_len=k_len,
        q_block=q_block,
        k_block=k_block,
        heads=call.q.shape[1] if skips else 1,
        skips=skips,
    )


def split_blocks(
    array: Array, *, size: int, padding: int, axis: int, mode: str = "constant"
) -> Array:
    """An axis padded and split into blocks; the number of blocks becomes the first axis."""
    if padding:
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, padding)
        array = jnp.pad(array, widths, mode=mode)
    shape = (*array.shape[:axis], -1, size, *array.shape[axis + 1 :])
    return jnp.moveaxis(array.reshape(shape), axis, 0)


def join_blocks(array: Array, *, axis: int, length: int) -> Array:
    """Blocks joined to an axis of this length: the inverse of ``split_blocks``."""
    array = jnp.moveaxis(array, 0, axis)
    array = array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
    return lax.slice_in_dim(array, 0, length, axis=axis)


def _block_bounds(
    low: Index | None, high: Index | None, size: int, count: int
) -> tuple[Index, Index]:
    """Blocks ``first .. end - 1`` hold all indices ``low .. high``; None for no bound."""
    if count == 1:
        return 0, 1
    first = 0 if low is None else jnp.maximum(low // size, 0)
    end = count if high is None else jnp.minimum(high // size + 1, count)
    return first, end


def _even_block_size(length: int) -> int:
    """About ``block_size``, with little padding; a multiple of 8 if there are several blocks."""
    count = -(-length // _block_size.get())
    return length if count == 1 else -(-length // (8 * count)) * 8
