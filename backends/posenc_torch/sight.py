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
_LEAST = 8 * BLOCK  # to which a CPU's arrays are filled


class Places(NamedTuple):
    """Positions or segments of the queries or the keys of a call.

    Attributes
    ----------
    own
        ``(L,)`` or ``(B, L)``.
    values
        What a kernel loads, ``captured``: the same, or ``(B, L)`` in any case.
    indexed
        Whether they are ``0 .. L - 1``, so that a kernel need not load them.
    """

    own: Tensor
    values: Tensor
    indexed: bool = False

    @classmethod
    def of(cls, values: Tensor, *, batch: int | None = None, indexed: bool = False) -> Places:
        """From values ``(L,)``, ``(1, L)`` or ``(B, L)``; a kernel finds ``batch`` rows of any."""
        one = values[0] if values.ndim == 2 and values.shape[0] == 1 else values
        if indexed:
            return cls(one, one, indexed)
        each = one if batch is None else one.expand(batch, -1)
        return cls(one, captured(each, rows=each.ndim == 2))

    @property
    def length(self) -> int:
        """How many there are."""
        return self.own.shape[-1]

    def at(self, b: Tensor, index: Tensor) -> Tensor:
        """What stands at an index, inside a kernel."""
        if self.indexed:
            return index
        return self.values[index] if self.values.ndim == 1 else self.values[b, index]

    def ranges(self) -> Range:
        """Lowest and highest of every block, ``(B or 1, n)``."""
        on_cpu = self.own.device.type == "cpu"
        return range_of(
            _filled(self.own, -1, self.blocks * BLOCK) if on_cpu else self.own, BLOCK, xp
        )

    @property
    def blocks(self) -> int:
        """How many blocks a mask has, the last of them perhaps not whole, or beyond the end."""
        on_cpu = self.own.device.type == "cpu"
        return -(-(room(self.length, least=_LEAST) if on_cpu else self.length) // BLOCK)


class Mask(NamedTuple):
    """Whether a query sees a key, inside a kernel.

    Attributes
    ----------
    q_pos, k_pos, q_seg, k_seg, causal
        As in ``posenc.attention``.
    limits
        Between which ``q_pos - k_pos`` must be, first and second of them, or None. They are a
        tensor: of Python numbers the first is compiled in, and the second becomes a symbol, which
        no kernel for a CPU takes.
    """

    q_pos: Places
    k_pos: Places
    q_seg: Places | None
    k_seg: Places | None
    causal: bool
    limits: Tensor | None

    def mask_mod(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether query ``i`` sees key ``j``."""
        q_seg = k_seg = None
        if self.q_seg is not None and self.k_seg is not None:
            q_seg, k_seg = self.q_seg.at(b, i), self.k_seg.at(b, j)
        q, k = self.q_pos.at(b, i), self.k_pos.at(b, j)
        seen = visible(q, k, q_seg, k_seg, causal=self.causal)
        if self.limits is not None:
            at = torch.zeros_like(h)  # an index inside a kernel is a tensor
            near = (q - k > self.limits[at]) & (q - k < self.limits[at + 1])
            seen = near if seen is None else seen & near
        return i >= 0 if seen is None else seen


class Sight(NamedTuple):
    """What decides whether a query sees a key; as in ``posenc.attention``."""

    q_pos: Places
    k_pos: Places
    q_seg: Places | None
    k_seg: Places | None
    causal: bool
    window: int | None

    def mask(self) -> Mask:
        """The same for a kernel; on a CPU one kernel for every window and none, causal or not."""
        device, places = self.q_pos.own.device, self[:4]
        if device.type != "cpu" and self.window is None:
            return Mask(*places, self.causal, None)
        window = 2**31 - 1 if self.window is None else self.window
        if device.type != "cpu":
            return Mask(
                *places, self.causal, numbers(-window, window, dtype=torch.int32, device=device)
            )
        lowest = -1 if self.causal else -window
        return Mask(*places, False, numbers(lowest, window, dtype=torch.int32, device=device))

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Blocks ``(B, nq, nk)`` that may hold a visible pair, and those where all are visible."""
        places = (self.q_pos, self.k_pos, self.q_seg, self.k_seg)
        ranges = (None if p is None else p.ranges() for p in places)
        some, every = between(*ranges, causal=self.causal, window=self.window, xp=xp)
        if self.q_pos.own.device.type == "cpu":
            some = some & _begun(self.q_pos)[:, None] & _begun(self.k_pos)
        return some, some & every & _whole(self.q_pos)[:, None] & _whole(self.k_pos)

    def block_mask(self, some: Tensor, every: Tensor) -> BlockMask:
        """As ``flex_attention`` takes it, from ``(B or 1, H or 1, nq, nk)``: blocks to look at, and
        those of them that need no mask.
        """
        return BlockMask.from_kv_blocks(
            *_ordered(some & ~every),
            *_ordered(every),
            BLOCK_SIZE=BLOCK,
            mask_mod=self.mask().mask_mod,
            seq_lengths=(self.q_pos.length, self.k_pos.length),
        )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen, and their indices, chosen ones first, in order."""
    indices = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32)


def captured(values: Tensor, *, rows: bool = False) -> Tensor:
    """As a kernel captures it: longer, for its last block loads beyond the end before it masks.

    The last axis is filled with its last values. On a CPU a size that is a symbol to the compiler
    becomes code that does not compile (PyTorch 2.13), and a new one would compile anew: there the
    last axis, and the first one if it is ``rows`` of a batch, has a size of ``room``.
    """
    if values.device.type != "cpu":
        length = values.shape[-1]
        missing = BLOCK * -(-length // BLOCK) - length
        return torch.cat([values, values[..., -1:].expand(*values.shape[:-1], missing)], dim=-1)
    if rows:
        values = _filled(values, 0, room(values.shape[0], least=4))
    size = room(values.shape[-1] + 1, least=_LEAST)
    # From inside a larger graph a CPU captures only what has memory of its own, as what is joined.
    return constant(torch.cat([_filled(values, -1, size - 1), values[..., -1:]], dim=-1))


def room(count: int, *, least: int) -> int:
    """``least``, doubled until ``count`` fit: so few sizes that each may be compiled for."""
    size = least
    while size < count:
        size *= 2
    return size


def numbers(*values: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of a call for a kernel to load, so that new ones compile nothing."""
    each = [torch.full((1,), value, dtype=dtype, device=device) for value in values]
    return captured(torch.cat(each))


def constant(array: Tensor) -> Tensor:
    """The same, of a size that is a number to a compiler, never a symbol."""
    torch._dynamo.mark_static(array)
    return array


def _filled(values: Tensor, dim: int, size: int) -> Tensor:
    """So long along an axis, with its last values.

    How many are missing is not asked for: each answer would be a kind of call to a compiler.
    """
    index = torch.arange(size, device=values.device)
    return values.index_select(dim, index.clamp(max=values.shape[dim] - 1))


def _whole(places: Places) -> Tensor:
    """Which blocks are as long as a block: beyond the end nothing is to be seen."""
    end = torch.arange(places.blocks, device=places.own.device) + 1
    return end * BLOCK <= places.length


def _begun(places: Places) -> Tensor:
    """Which blocks hold anything."""
    return torch.arange(places.blocks, device=places.own.device) * BLOCK < places.length
