"""The mask as FlexAttention takes it: a ``mask_mod`` for pairs, and a mask of blocks.

The lowest and highest position and segment of a block's queries and keys decide whether the block
is empty or fully visible. This takes work and memory ``O((L / 128)**2)``, never ``L**2``. In all
other blocks the kernel asks ``mask_mod`` pair by pair.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from threading import Lock
from types import CellType, FunctionType, NoneType
from typing import Any, NamedTuple, TypeAlias

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from posenc.backend import (
    Mask,
    Range,
    Tokens,
    block_ranges,
    is_function,
    visible,
    visible_between,
)
from posenc_torch.flex import target

BLOCK = 128  # FlexAttention's default
Diagonals: TypeAlias = tuple[int | None, int | None]
"""``first`` and ``end``, None for no bound. Block ``a`` of queries and block ``b`` of keys are on
them if ``first <= b - a < end``."""
_MIN_LENGTH = 8 * BLOCK  # of arrays that a kernel for a CPU captures
_MAX_DISTANCE = 2**31 - 1  # no difference of positions is larger

# Parts of callers' masks by key, like the schemes in posenc_torch.flex.score_mod. Torch's compiler
# treats what it reaches from a global as constant, also the values that a function closes over.
_MASKS: dict[str, Mask] = {}
_KEYS: dict[Hashable, str] = {}
_LOCK = Lock()  # a new key counts those there are


class TokenIntegers(NamedTuple):
    """One integer per query or key: positions, segments or places.

    Attributes
    ----------
    values
        ``(L,)`` or ``(B, L)``.
    padded
        ``values`` after ``capture``, for kernels to load: ``(batch, L)`` if a batch is given.
    is_index
        Whether they are ``0 .. L - 1``, so that a kernel need not load them.
    """

    values: Tensor
    padded: Tensor
    is_index: bool = False

    @classmethod
    def of(
        cls, values: Tensor, *, batch: int | None = None, is_index: bool = False
    ) -> TokenIntegers:
        """From values ``(L,)``, ``(1, L)`` or ``(B, L)``; kernels load ``batch`` rows if given."""
        one = values[0] if values.ndim == 2 and values.shape[0] == 1 else values
        if is_index:
            return cls(one, one, is_index)
        rows = one if batch is None else one.expand(batch, -1)
        return cls(one, capture(rows, rows=rows.ndim == 2))

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.values.shape[-1]

    def at(self, b: Tensor, index: Tensor) -> Tensor:
        """The integer at an index, inside a kernel."""
        if self.is_index:
            return index
        return self.padded[index] if self.padded.ndim == 1 else self.padded[b, index]

    def ranges(self) -> Range:
        """Lowest and highest integer of every block, ``(B or 1, n)``."""
        on_cpu = target.is_cpu(self.values)
        size = self.blocks * BLOCK
        return block_ranges(
            _pad_with_last(self.values, -1, size) if on_cpu else self.values, BLOCK, xp
        )

    @property
    def blocks(self) -> int:
        """The number of blocks of a mask; the last may be partly or fully beyond the end."""
        on_cpu = target.is_cpu(self.values)
        length = padded_size(self.length, least=_MIN_LENGTH) if on_cpu else self.length
        return -(-length // BLOCK)


class KernelMask(NamedTuple):
    """The mask as a kernel evaluates it, pair by pair.

    Attributes
    ----------
    q_pos, k_pos, q_seg, k_seg
        As in ``posenc.attention``.
    causal
        As in ``posenc.attention``; None if ``limits`` decides it.
    limits
        The lowest and the highest ``q_pos - k_pos`` inside the window, the number of sink tokens,
        and the lowest ``q_pos - k_pos`` of all. Or None. They are a tensor, because torch makes a
        Python number a symbol (SymInt) at its second value. Kernels for a CPU take no symbols.
    has_first_tokens
        Whether there may be sink tokens.
    parts
        Further masks of positions and segments, or their keys.
    booleans
        The caller's ``(B or 1, H or 1, Q, K)`` after ``capture_pairs``, or None.
    diagonals
        Those of blocks, or None for all.
    """

    q_pos: TokenIntegers
    k_pos: TokenIntegers
    q_seg: TokenIntegers | None
    k_seg: TokenIntegers | None
    causal: bool | None
    limits: Tensor | None
    has_first_tokens: bool
    parts: tuple[Mask | str, ...]
    booleans: Tensor | None
    diagonals: Diagonals | None = None

    def mask_mod(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether query ``i`` sees key ``j``."""
        q_seg = k_seg = None
        if self.q_seg is not None and self.k_seg is not None:
            q_seg, k_seg = self.q_seg.at(b, i), self.k_seg.at(b, j)
        q, k = self.q_pos.at(b, i), self.k_pos.at(b, j)
        mask = visible(q, k, q_seg, k_seg, causal=bool(self.causal))
        if self.limits is not None:
            mask = _both(mask, self._inside(self.limits, q, k, torch.zeros_like(h)))
        for each in self.parts:
            part = _MASKS[each] if isinstance(each, str) else each
            seen = part.pairs(Tokens(q, q_seg), Tokens(k, k_seg), xp)
            mask = mask if seen is None else _both(mask, seen)
        if self.booleans is not None:
            row, head = row_index(self.booleans, 0, b), row_index(self.booleans, 1, h)
            mask = _both(mask, self.booleans[row, head, i, j])
        if self.diagonals is not None:
            shift = BLOCK.bit_length() - 1
            mask = _both(mask, _between((j >> shift) - (i >> shift), self.diagonals))
        return i >= 0 if mask is None else mask

    def _inside(self, limits: Tensor, q: Tensor, k: Tensor, first: Tensor) -> Tensor:
        """Whether a key is inside the limits; ``first`` is 0, as an index inside a kernel."""
        back = q - k
        inside = (back >= limits[first]) & (back <= limits[first + 1])
        if self.has_first_tokens:
            inside = inside | ((k >= 0) & (k < limits[first + 2]))
        return inside & (back >= limits[first + 3]) if self.causal is None else inside


def _between(diagonal: Tensor, diagonals: Diagonals) -> Tensor:
    """Whether the differences of block indices are on some diagonals."""
    first, end = diagonals
    inside = diagonal == diagonal if first is None else diagonal >= first
    return inside if end is None else inside & (diagonal < end)


def _both(mask: Tensor | None, other: Tensor) -> Tensor:
    return other if mask is None else mask & other


class BlockMaskInputs(NamedTuple):
    """The inputs of a block mask; each as in ``posenc.attention``."""

    q_pos: TokenIntegers
    k_pos: TokenIntegers
    q_seg: TokenIntegers | None
    k_seg: TokenIntegers | None
    mask: Mask
    diagonals: Diagonals | None = None

    def kernel_mask(self) -> KernelMask:
        """The mask inside a kernel; on a CPU one kernel serves all windows, causal or not."""
        device, on_cpu = self.q_pos.values.device, target.is_cpu(self.q_pos.values)
        mask, tokens, parts = self.mask, self[:4], mask_keys(self.mask)
        booleans = None if mask.array is None else capture_pairs(mask.array)
        if not on_cpu and mask.window is None:
            return KernelMask(*tokens, mask.causal, None, False, parts, booleans, self.diagonals)
        limits = capture_scalars(
            -_MAX_DISTANCE if mask.right is None else _clamp(-mask.right),
            _MAX_DISTANCE if mask.left is None else _clamp(mask.left),
            _clamp(mask.first_tokens),
            0 if mask.causal else -_MAX_DISTANCE,
            dtype=torch.int32, device=device,
        )  # fmt: skip
        causal, has_first_tokens = None if on_cpu else mask.causal, on_cpu or mask.first_tokens > 0
        return KernelMask(
            *tokens, causal, limits, has_first_tokens, parts, booleans, self.diagonals
        )

    def visible_blocks(self) -> tuple[Tensor, Tensor]:
        """Blocks ``(B or 1, nq, nk)`` with any visible pair, and those with all pairs visible.

        The first may include blocks without a visible pair. The second may lack blocks in which
        all pairs are visible.
        """
        segments = [None if seg is None else seg.ranges() for seg in (self.q_seg, self.k_seg)]
        any_visible, all_visible = visible_between(
            self.mask, self.q_pos.ranges(), self.k_pos.ranges(), *segments
        )
        if target.is_cpu(self.q_pos.values):
            any_visible = (
                any_visible & _nonempty_blocks(self.q_pos)[:, None] & _nonempty_blocks(self.k_pos)
            )
        if self.diagonals is not None:
            a, b = (torch.arange(n, device=any_visible.device) for n in any_visible.shape[-2:])
            any_visible = any_visible & _between(b - a[:, None], self.diagonals)
        complete = _complete_blocks(self.q_pos)[:, None] & _complete_blocks(self.k_pos)
        return any_visible, any_visible & all_visible & complete

    def block_mask(self, any_visible: Tensor, all_visible: Tensor) -> BlockMask:
        """The mask that ``flex_attention`` takes, from blocks ``(B or 1, H or 1, nq, nk)``."""
        return BlockMask.from_kv_blocks(
            *_block_indices(any_visible & ~all_visible),
            *_block_indices(all_visible),
            BLOCK_SIZE=BLOCK,
            mask_mod=self.kernel_mask().mask_mod,
            seq_lengths=(self.q_pos.length, self.k_pos.length),
        )

    def block_mask_of_lists(self, lists: Mapping[str, Any]) -> BlockMask:
        """The mask that ``flex_attention`` takes, from its lists of blocks by name."""
        lengths, mask_mod = (self.q_pos.length, self.k_pos.length), self.kernel_mask().mask_mod
        return BlockMask(seq_lengths=lengths, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod, **lists)


def _block_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number of chosen blocks per row, and block indices: chosen ones first, in order."""
    indices = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32)


def capture(values: Tensor, *, rows: bool = False, axis: int = -1) -> Tensor:
    """The values for a kernel to load: padded, because its last block loads before it masks.

    An axis is padded with its last value. Inside a larger graph a GPU's kernel bounds its indices,
    unless it knows that lengths are whole blocks, so there is no padding. On a CPU, code with a
    symbol as a size does not compile (PyTorch 2.13), and each new constant size compiles again. So
    on a CPU the axis has a ``padded_size``. The first axis has one too if it is ``rows`` of a
    batch.
    """
    length, dim = values.shape[axis], axis % values.ndim
    if not target.is_cpu(values):
        compiling = torch.compiler.is_compiling()
        return own_memory(values) if compiling else pad_to_blocks(values, dim)
    if rows:
        values = _pad_with_last(values, 0, padded_size(values.shape[0], least=4))
    size = padded_size(length + 1, least=_MIN_LENGTH)
    last = values.narrow(dim, length - 1, 1)
    # Inside a larger graph, a kernel for a CPU captures only tensors that own their memory, as the
    # result of cat does.
    return mark_static(torch.cat([_pad_with_last(values, dim, size - 1), last], dim=dim))


def pad_to_blocks(values: Tensor, dim: int) -> Tensor:
    """The values with whole blocks along an axis, padded with the last one."""
    length = values.shape[dim]
    missing = BLOCK * -(-length // BLOCK) - length
    shape = [missing if n == dim else -1 for n in range(values.ndim)]
    return torch.cat([values, values.narrow(dim, length - 1, 1).expand(shape)], dim=dim)


def own_memory(values: Tensor) -> Tensor:
    """The values; inside a larger graph for a GPU, in memory of their own.

    Without it Inductor (PyTorch 2.13) fails, or computes them again for each score, inside the
    kernel. ``as_strided`` needs memory. A captured tensor with a gradient must not have a formula
    of lengths as a size, such as ``L + 128``: Inductor then fails in the backward pass.
    """
    if target.is_cpu(values) or not torch.compiler.is_compiling():
        return values
    whole = values.contiguous()
    return whole.as_strided(whole.shape, whole.stride())


def capture_pairs(values: Tensor) -> Tensor:
    """Values ``(B or 1, H or 1, Q, K)`` for a kernel to load, padded along both lengths."""
    return capture(capture(values, axis=2), rows=values.shape[0] != 1, axis=3)


def mask_keys(mask: Mask) -> tuple[Mask | str, ...]:
    """The keys by which a kernel finds the parts of a mask; inside a larger graph, the parts."""
    if torch.compiler.is_compiling():
        return mask.parts
    return tuple(_key(part) for part in mask.parts)


def _key(part: Mask) -> str:
    """The key of a part; of a function with equal code and values, the same one."""
    identity: Hashable
    if is_function(part):
        part, identity = _function_and_identity(part)
    else:
        try:
            hash(part)
        except TypeError:  # it holds a tensor, say
            identity = id(part)
        else:
            identity = part
    with _LOCK:
        key = _KEYS.setdefault(identity, str(len(_KEYS)))
        _MASKS.setdefault(key, part)
    return key


def _function_and_identity(part: Any) -> tuple[Mask, Hashable]:
    """A mask of a function, and what tells whether another is the same mask."""
    function, closed = part.of, _closed_over(part.of)
    if closed is None:
        return part, (id(function), part.with_segments)
    # Functions with the same code and equal values are one mask: a lambda written where attention
    # is called compiles once. A cell may change, so the copy has its own cells.
    assert isinstance(function, FunctionType)
    code, around = function.__code__, function.__globals__
    defaults = function.__defaults__ or ()
    values = tuple((type(v), v) for v in (*closed, *defaults))
    cells = tuple(CellType(value) for value in closed)
    own = FunctionType(code, around, function.__name__, defaults, cells)
    return replace(part, of=own), (code, id(around), values, part.with_segments)


def _closed_over(function: object) -> tuple[object, ...] | None:
    """The values that a function closes over, if they, its code and its defaults determine it.

    None if it is no Python function, or if a value is neither number nor string.
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


def row_index(array: Tensor, axis: int, index: Tensor) -> Tensor:
    """The index along an axis, or 0 if the axis has size 1."""
    return torch.zeros_like(index) if array.shape[axis] == 1 else index


def _clamp(limit: int) -> int:
    """A limit that int32 holds."""
    return max(-_MAX_DISTANCE, min(limit, _MAX_DISTANCE))


def padded_size(count: int, *, least: int) -> int:
    """``least``, doubled until ``count`` fit: there are few such sizes to compile for."""
    size = least
    while size < count:
        size *= 2
    return size


def capture_scalars(*values: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scalars of a call as a tensor that kernels load: new values compile nothing."""
    scalars = [torch.full((1,), value, dtype=dtype, device=device) for value in values]
    return capture(torch.cat(scalars))


def mark_static(array: Tensor) -> Tensor:
    """Mark the sizes of an array as constants to the compiler, never symbols; return the array."""
    torch._dynamo.mark_static(array)
    return array


def _pad_with_last(values: Tensor, dim: int, size: int) -> Tensor:
    """``size`` values along an axis, padded with the last one.

    It does not compute how many are missing: the compiler would specialise on each answer.
    """
    index = torch.arange(size, device=values.device)
    return values.index_select(dim, index.clamp(max=values.shape[dim] - 1))


def _complete_blocks(tokens: TokenIntegers) -> Tensor:
    """Which blocks lie fully before the end; beyond it nothing is visible."""
    end = torch.arange(tokens.blocks, device=tokens.values.device) + 1
    return end * BLOCK <= tokens.length


def _nonempty_blocks(tokens: TokenIntegers) -> Tensor:
    """Which blocks hold any token."""
    return torch.arange(tokens.blocks, device=tokens.values.device) * BLOCK < tokens.length
