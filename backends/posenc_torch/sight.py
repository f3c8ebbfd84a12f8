"""Who sees whom, as FlexAttention takes it: a mask of elements, and one of blocks.

Whether a block is empty or seen whole is decided from the lowest and highest position and segment
of its queries and of its keys: work and memory ``O((L / 128)**2)``, never ``L**2``. What is neither
is decided element by element inside the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posenc.positions import visible

BLOCK = 128  # FlexAttention's own

Range = tuple[Tensor, Tensor]


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
        values = torch.atleast_2d(self.values)[:, : self.blocks * BLOCK]
        blocks = values.unflatten(-1, (-1, BLOCK))
        return blocks.amin(dim=-1), blocks.amax(dim=-1)

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
        q_low, q_high = (a[:, :, None] for a in self.q_pos.ranges())
        k_low, k_high = (a[:, None, :] for a in self.k_pos.ranges())
        some = torch.ones_like(q_low - k_low, dtype=torch.bool)
        every = _whole(self.q_pos)[:, None] & _whole(self.k_pos)
        if self.causal:
            some, every = some & (k_low <= q_high), every & (k_high <= q_low)
        if self.window is not None:
            nearest, farthest = q_low - k_high, q_high - k_low
            some = some & (nearest < self.window) & (farthest > -self.window)
            every = every & (farthest < self.window) & (nearest > -self.window)
        if self.q_seg is not None and self.k_seg is not None:
            q_low, q_high = (a[:, :, None] for a in self.q_seg.ranges())
            k_low, k_high = (a[:, None, :] for a in self.k_seg.ranges())
            some = some & (q_low <= k_high) & (k_low <= q_high)
            every = every & (q_low == k_high) & (k_low == q_high)
        return some, some & every


def padded(values: Tensor) -> Tensor:
    """Whole blocks along the last axis, filled with its last values.

    Kernels load before they mask, and their last block reaches beyond the end. On a CPU a length
    that is a symbol to the compiler becomes code that does not compile (PyTorch 2.13): there the
    blocks are as many as a power of two, and compiled for as they are.
    """
    length, on_cpu = values.shape[-1], values.device.type == "cpu"
    blocks = -(-length // BLOCK)
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
