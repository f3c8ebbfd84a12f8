"""Who sees whom, as FlexAttention takes it: a mask of elements, and one of blocks.

Whether a block is empty or seen whole is decided from the lowest and highest position and segment
of its queries and of its keys: work and memory ``O((L / 128)**2)``, never ``L**2``. What is neither
is decided element by element inside the kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import CellType, FunctionType, NoneType
from typing import NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from posenc.backend import (
    FirstTokens,
    Range,
    Window,
    block_ranges,
    visible,
    visible_between,
)
from posenc.backend import (
    Mask as OwnMask,
)

BLOCK = 128  # FlexAttention's own
_LEAST = 8 * BLOCK  # to which a CPU's arrays are filled
_FAR = 2**31 - 1  # no difference of positions is larger

# Masks of callers by name, as schemes are in posenc_torch.flex.score_mod: what a function closes
# over is a constant to torch's compiler where it is reached from a global.
_NAMED: dict[str, OwnMask] = {}
_NAMES: dict[Hashable, str] = {}


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
        return block_ranges(
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
    q_pos, k_pos, q_seg, k_seg
        As in ``posenc.attention``.
    causal
        Likewise; None if it is among the limits.
    limits
        The lowest and the highest ``q_pos - k_pos`` inside of the window, how many first keys are
        inside of any, and the lowest difference of all; or None. They are a tensor: of Python
        numbers the first is compiled in, and the second becomes a symbol, which no kernel for a CPU
        takes.
    sinks
        Whether there may be such first keys.
    own
        The caller's function, or its name, or None.
    booleans
        The caller's ``(B or 1, H or 1, Q, K)``, ``captured``, or None.
    """

    q_pos: Places
    k_pos: Places
    q_seg: Places | None
    k_seg: Places | None
    causal: bool | None
    limits: Tensor | None
    sinks: bool
    own: OwnMask | str | None
    booleans: Tensor | None

    def mask_mod(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether query ``i`` sees key ``j``."""
        q_seg = k_seg = None
        if self.q_seg is not None and self.k_seg is not None:
            q_seg, k_seg = self.q_seg.at(b, i), self.k_seg.at(b, j)
        q, k = self.q_pos.at(b, i), self.k_pos.at(b, j)
        seen = visible(q, k, q_seg, k_seg, causal=bool(self.causal))
        if self.limits is not None:
            near = self._near(self.limits, q, k, torch.zeros_like(h))
            seen = near if seen is None else seen & near
        if self.own is not None:
            own = _NAMED[self.own] if isinstance(self.own, str) else self.own
            found = own(q, k, q_seg, k_seg)
            seen = found if seen is None else seen & found
        if self.booleans is not None:
            found = self.booleans[row_of(self.booleans, 0, b), row_of(self.booleans, 1, h), i, j]
            seen = found if seen is None else seen & found
        return i >= 0 if seen is None else seen

    def _near(self, limits: Tensor, q: Tensor, k: Tensor, first: Tensor) -> Tensor:
        """Whether a key is inside of the limits; ``first`` is 0, as an index inside a kernel."""
        back = q - k
        near = (back >= limits[first]) & (back <= limits[first + 1])
        if self.sinks:
            near = near | ((k >= 0) & (k < limits[first + 2]))
        return near & (back >= limits[first + 3]) if self.causal is None else near


class Sight(NamedTuple):
    """What decides whether a query sees a key; as in ``posenc.attention``."""

    q_pos: Places
    k_pos: Places
    q_seg: Places | None
    k_seg: Places | None
    causal: bool
    window: Window | None
    sink_tokens: int = 0
    own: OwnMask | Tensor | None = None

    def mask(self) -> Mask:
        """The same for a kernel; on a CPU one kernel for every window and none, causal or not."""
        device, on_cpu = self.q_pos.own.device, self.q_pos.own.device.type == "cpu"
        own = known(self.own) if isinstance(self.own, OwnMask) else None
        booleans = captured_pairs(self.own) if isinstance(self.own, Tensor) else None
        places = self[:4]
        if not on_cpu and self.window is None:
            return Mask(*places, self.causal, None, False, own, booleans)
        left, right = (None, None) if self.window is None else self.window
        limits = numbers(
            -_FAR if right is None else _within(-right),
            _FAR if left is None else _within(left),
            _within(self.sink_tokens),
            0 if self.causal else -_FAR,
            dtype=torch.int32, device=device,
        )  # fmt: skip
        sinks = on_cpu or self.sink_tokens > 0
        return Mask(*places, None if on_cpu else self.causal, limits, sinks, own, booleans)

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Blocks ``(B, nq, nk)`` that may hold a visible pair, and those where all are visible."""
        segments = [None if p is None else p.ranges() for p in (self.q_seg, self.k_seg)]
        some, every = visible_between(
            self.q_pos.ranges(), self.k_pos.ranges(), *segments,
            causal=self.causal, window=self.window, sink_tokens=self.sink_tokens, xp=xp,
        )  # fmt: skip
        if self.own is not None:  # it may hide anything
            every = every & False
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


def captured(values: Tensor, *, rows: bool = False, axis: int = -1) -> Tensor:
    """As a kernel captures it: longer, for its last block loads beyond the end before it masks.

    An axis is filled with its last values. On a CPU a size that is a symbol to the compiler becomes
    code that does not compile (PyTorch 2.13), and a new one would compile anew: there that axis,
    and the first one if it is ``rows`` of a batch, has a size of ``room``.
    """
    length, dim = values.shape[axis], axis % values.ndim
    last = values.narrow(dim, length - 1, 1)
    if values.device.type != "cpu":
        missing = BLOCK * -(-length // BLOCK) - length
        shape = [missing if n == dim else -1 for n in range(values.ndim)]
        return torch.cat([values, last.expand(shape)], dim=dim)
    if rows:
        values = _filled(values, 0, room(values.shape[0], least=4))
    size = room(length + 1, least=_LEAST)
    last = values.narrow(dim, length - 1, 1)
    # From inside a larger graph a CPU captures only what has memory of its own, as what is joined.
    return constant(torch.cat([_filled(values, dim, size - 1), last], dim=dim))


def captured_pairs(values: Tensor) -> Tensor:
    """``(B or 1, H or 1, Q, K)`` as a kernel captures it."""
    return captured(captured(values, axis=2), rows=values.shape[0] != 1, axis=3)


def known(mask: OwnMask) -> OwnMask | str:
    """Under which name a kernel finds a caller's mask; inside of a larger graph, the mask."""
    if torch.compiler.is_compiling():
        return mask
    function, closed = mask.function, _closed_over(mask.function)
    key: Hashable = function if isinstance(function, FirstTokens) else id(function)
    if closed is not None:
        # Of one code and equal numbers they are one: a lambda written where attention is called
        # compiles once. A cell may change, so that a copy has cells of its own.
        assert isinstance(function, FunctionType)
        code, around = function.__code__, function.__globals__
        defaults = function.__defaults__ or ()
        key = code, id(around), tuple((type(v), v) for v in (*closed, *defaults))
        cells = tuple(CellType(value) for value in closed)
        function = FunctionType(code, around, function.__name__, defaults, cells)
    name = _NAMES.setdefault((key, mask.with_segments), str(len(_NAMES)))
    _NAMED.setdefault(name, OwnMask(function, mask.with_segments))
    return name


def _closed_over(function: object) -> tuple[object, ...] | None:
    """The values that a function closes over; None if it may be told from another by more than its
    code, numbers and words.
    """
    if not isinstance(function, FunctionType) or function.__kwdefaults__:
        return None
    try:
        closed = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a cell that is still empty
        return None
    values = (*closed, *(function.__defaults__ or ()))
    simple = all(type(value) in (bool, int, float, str, NoneType) for value in values)
    return closed if simple else None


def row_of(array: Tensor, axis: int, index: Tensor) -> Tensor:
    """An index along an axis, or 0 where all share one."""
    return torch.zeros_like(index) if array.shape[axis] == 1 else index


def _within(number: int) -> int:
    """A limit that int32 holds."""
    return max(-_FAR, min(number, _FAR))


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
