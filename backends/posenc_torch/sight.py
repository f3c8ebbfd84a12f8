"""Who sees whom, as FlexAttention takes it: a mask of elements, and one of blocks.

Whether a block is empty or seen whole is decided from the lowest and highest position and segment
of its queries and of its keys: work and memory ``O((L / 128)**2)``, never ``L**2``. What is neither
is decided element by element inside the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from posenc.blocks import Range, between, range_of
from posenc.positions import visible

BLOCK = 128  # FlexAttention's own


class Places(NamedTuple):
    """Positions or segments of the queries or the keys of a call.

    Attributes
    ----------
    values
        ``(L,)`` or ``(B, L)``, ``padded``.
    length
        Without padding.
    indexed
        Whether the values are ``0 .. L - 1``, so that a kernel need not load them.
    """

    values: Tensor
    length: int
    indexed: bool = False

    @classmethod
    def of(cls, values: Tensor, *, indexed: bool = False) -> Places:
        """From values ``(L,)``, ``(1, L)`` or ``(B, L)``."""
        one = values[0] if values.ndim == 2 and values.shape[0] == 1 else values
        return cls(padded(one), values.shape[-1], indexed)

    def at(self, b: Tensor, index: Tensor) -> Tensor:
        """What stands at an index, inside a kernel."""
        if self.indexed:
            return index
        return self.values[index] if self.values.ndim == 1 else self.values[b, index]

    def ranges(self) -> Range:
        """Lowest and highest of every block, ``(B or 1, n)``."""
        return range_of(self.values[..., : self.blocks * BLOCK], BLOCK, xp)

    @property
    def blocks(self) -> int:
        """How many blocks there are, the last of them perhaps not whole."""
        return -(-self.length // BLOCK)


class Sight(NamedTuple):
    """What decides whether a query sees a key; as in ``posenc.attention``."""

    q_pos: Places
    k_pos: Places
    q_seg: Places | None
    k_seg: Places | None
    causal: bool
    window: int | None

    def mask_mod(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether query ``i`` sees key ``j``."""
        q_seg = k_seg = None
        if self.q_seg is not None and self.k_seg is not None:
            q_seg, k_seg = self.q_seg.at(b, i), self.k_seg.at(b, j)
        seen = visible(
            self.q_pos.at(b, i), self.k_pos.at(b, j), q_seg, k_seg,
            causal=self.causal, window=self.window,
        )  # fmt: skip
        return i >= 0 if seen is None else seen

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Blocks ``(B, nq, nk)`` that may hold a visible pair, and those where all are visible."""
        places = (self.q_pos, self.k_pos, self.q_seg, self.k_seg)
        ranges = (None if p is None else p.ranges() for p in places)
        some, every = between(*ranges, causal=self.causal, window=self.window, xp=xp)
        return some, some & every & _whole(self.q_pos)[:, None] & _whole(self.k_pos)

    def block_mask(self, some: Tensor, every: Tensor) -> BlockMask:
        """As ``flex_attention`` takes it, from ``(B or 1, H or 1, nq, nk)``: blocks to look at, and
        those of them that need no mask.
        """
        return BlockMask.from_kv_blocks(
            *_ordered(some & ~every),
            *_ordered(every),
            BLOCK_SIZE=BLOCK,
            mask_mod=self.mask_mod,
            seq_lengths=(self.q_pos.length, self.k_pos.length),
        )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen, and their indices, chosen ones first, in order."""
    indices = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32)


def padded(values: Tensor) -> Tensor:
    """Whole blocks along the last axis, filled with its last values.

    Kernels load before they mask, and their last block reaches beyond the end. On a CPU a length
    that is a symbol to the compiler becomes code that does not compile (PyTorch 2.13): there the
    blocks are as many as a power of two, and compiled for as they are.
    """
    length, on_cpu = values.shape[-1], values.device.type == "cpu"
    # Captured there from inside a larger graph, an array must be a copy: always some padding.
    least = 1 if on_cpu and torch.compiler.is_compiling() else 0
    blocks = -(-(length + least) // BLOCK)
    size = BLOCK * (2 ** (blocks - 1).bit_length() if on_cpu else blocks)
    fill = values[..., -1:].expand(*values.shape[:-1], size - length)
    whole = torch.cat([values, fill], dim=-1)
    if on_cpu and not torch.compiler.is_compiling():
        torch._dynamo.mark_static(whole)
    return whole


def _whole(places: Places) -> Tensor:
    """Which blocks are as long as a block: beyond the end nothing is to be seen."""
    end = torch.arange(places.blocks, device=places.values.device) + 1
    return end * BLOCK <= places.length
