"""A scheme's bias as FlexAttention asks for it: a function of a score and four indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor

from posenc.call import Call
from posenc.evaluate import scheme_bias
from posenc.params import Params
from posenc.protocol import PositionScheme
from posenc_torch.loads import shared_by_heads
from posenc_torch.sight import BLOCK, Places, captured, constant, numbers

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# Schemes by name, so that a kernel reads their numbers from here. What is reached from a global is
# a constant to torch's compiler; of what comes with a call, the second number becomes a symbol,
# which no kernel for a CPU takes.
_NAMED: dict[str, PositionScheme] = {}
_NAMES: dict[Any, str] = {}


def name_of(scheme: PositionScheme) -> str:
    """Under which a kernel finds a scheme; equal ones have the same."""
    try:
        name = _NAMES.setdefault(scheme, str(len(_NAMES)))
    except TypeError:  # not hashable: it is only equal to itself
        name = _NAMES.setdefault(("id", id(scheme)), str(len(_NAMES)))
    _NAMED.setdefault(name, scheme)
    return name


def _known(scheme: PositionScheme) -> PositionScheme | str:
    """The name of a scheme; inside of a larger graph the scheme, with constants for numbers."""
    return _fixed(scheme) if torch.compiler.is_compiling() else name_of(scheme)


def _fixed(scheme: PositionScheme) -> PositionScheme:
    """The same with integers that are constants to torch's compiler, which traces this.

    A graph that someone compiles for schemes that differ has symbols for their numbers.
    """
    if not hasattr(scheme, "__dict__"):
        return scheme
    same = object.__new__(type(scheme))
    for name, value in vars(scheme).items():
        object.__setattr__(same, name, _number(value))
    return same


def _number(value: Any) -> Any:
    """How far a range counts, and so an integer, is decided while it is traced."""
    if isinstance(value, tuple):
        return tuple(_number(v) for v in value)
    if type(value) is not int:
        return value
    return len(range(value)) if value >= 0 else -len(range(-value))


class HeadRow:
    """The table of one head, chosen inside a kernel: each answer is one load of the whole array."""

    def __init__(self, array: Tensor, head: Tensor) -> None:
        self._array, self._head = array, head
        self.shape, self.dtype = tuple(array.shape[1:]), array.dtype

    def __getitem__(self, index: Any) -> Tensor:
        # Loads come before the mask, and beyond the end of keys an index may be anything.
        where = index if isinstance(index, tuple) else (index,)
        inside = [
            i if isinstance(i, int) else torch.clamp(i, 0, size - 1)
            for i, size in zip(where, self.shape, strict=True)
        ]
        return self._array[(self._head, *inside)]


class HeadParams(Params):
    """The params of one head: each loaded when first asked for, and once.

    FlexAttention's backward pass takes one load of an array that learns, and none without a use.
    """

    def __init__(
        self, arrays: Mapping[str, Tensor], whole: Sequence[str], head: Tensor, dtype: torch.dtype
    ) -> None:
        super().__init__(arrays, dtype)
        self._whole, self._head = whole, head
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._view(name)
        return self._loaded[name]

    def _view(self, name: str) -> Any:
        array = self._arrays[name]
        if name in self._whole:
            return array
        head = _row_of(array, self._head)
        return array[head] if array.ndim == 1 else HeadRow(array, head)


class Bias(NamedTuple):
    """A scheme's bias where FlexAttention asks for it; the scheme itself or its name."""

    known: PositionScheme | str
    arrays: Mapping[str, Tensor]
    dtype: torch.dtype
    q: Places
    k: Places
    coords: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls,
        scheme: PositionScheme,
        arrays: Mapping[str, Tensor],
        dtype: torch.dtype,
        places: tuple[Places, Places],
        coords: tuple[Tensor, Tensor] | None,
    ) -> Bias:
        """From the parts of a call."""
        return cls(_known(scheme), _of_known_size(arrays), dtype, *places, coords)

    @property
    def scheme(self) -> PositionScheme:
        """Whose bias it is."""
        return _NAMED[self.known] if isinstance(self.known, str) else self.known

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score with the bias of head ``h`` added."""
        scheme = self.scheme
        params = HeadParams(self.arrays, shared_by_heads(scheme), h, self.dtype)
        bias = scheme_bias(scheme, *self._at(b, h, i, j), params, xp=xp)
        if bias is None:
            return score
        return score.to(_wide(score)) + bias.to(_wide(score))

    def _at(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        if self.coords is None:
            return self.q.at(b, i), self.k.at(b, j)
        q, k = self.coords
        return q[b, h, i], k[b, h, j]


class ByDistance(NamedTuple):
    """A bias read from its values at every distance back, ``q_pos - k_pos``.

    Attributes
    ----------
    table
        ``(H, n)`` or ``(1, n)``, with a block before and after what can be asked for: kernels load
        before they mask.
    offset
        What ``i - j`` has in the table, a tensor; None for ``BLOCK``, where no length is in it.
    """

    table: Tensor
    offset: Tensor | None

    @classmethod
    def of(cls, call: Call, by_distance: Tensor) -> ByDistance:
        """From the bias at the distances ``1 - K .. Q - 1`` of ``k_pos - q_pos``."""
        q_len, k_len = call.q.shape[2], call.k.shape[2]
        back = by_distance.flip(-1)
        ahead = q_len - 1  # so many of them are distances to later keys
        if call.causal:
            back, ahead = back[:, ahead:], 0
        table = captured(torch.nn.functional.pad(back, (BLOCK, BLOCK)))
        if call.causal and q_len == k_len:
            return cls(table, None)
        # The first query stands at K - Q.
        return cls(table, captured(call.q_pos[:1] + (BLOCK + ahead)))

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score with the bias of head ``h`` added."""
        offset = BLOCK if self.offset is None else _only(self.offset, h)
        bias = self.table[_row_of(self.table, h), i - j + offset]
        return score.to(_wide(score)) + bias.to(_wide(score))


class Scaled(NamedTuple):
    """Scores times a number of the call, and then their bias."""

    scale: Tensor
    bias: Bias | ByDistance | None

    @classmethod
    def of(cls, scale: float, device: torch.device, bias: Bias | ByDistance | None) -> Scaled:
        """From the parts of a call."""
        return cls(numbers(scale, dtype=torch.float32, device=device), bias)

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score, scaled, with the bias of head ``h`` added."""
        scaled = score.to(_wide(score)) * _only(self.scale, h)
        return scaled if self.bias is None else self.bias.score_mod(scaled, b, h, i, j)


def apart(q_coords: Tensor, k_coords: Tensor) -> tuple[Tensor, Tensor]:
    """Copies, also where both are one: a backward pass takes one load of each."""
    q, k = captured(q_coords, rows=True).clone(), captured(k_coords, rows=True)
    return (constant(q) if q.device.type == "cpu" else q), k  # a copy has no marks


def _of_known_size(arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Constants and params of a scheme; on a CPU of sizes that are numbers to the compiler.

    They are copies: the caller's own tensors get no marks, and from inside a larger graph a CPU
    captures only what has memory of its own, which ``captured`` gives (PyTorch 2.13).
    """
    if not any(a.device.type == "cpu" for a in arrays.values()):
        return arrays
    if not torch.compiler.is_compiling():
        return {n: constant(a.clone()) for n, a in arrays.items()}
    sized = {n: constant(a) for n, a in arrays.items()}
    return {n: captured(a)[..., : a.shape[-1]] if a.ndim else a for n, a in sized.items()}


def _only(values: Tensor, head: Tensor) -> Tensor:
    """The first number, inside a kernel, where an index is a tensor."""
    return values[torch.zeros_like(head)]


def _row_of(array: Tensor, head: Tensor) -> Tensor:
    """The head's own row, or the one that all heads have."""
    return torch.zeros_like(head) if array.shape[0] == 1 else head


def _wide(score: Tensor) -> torch.dtype:
    """At least float32: a score is traced in q's dtype, and half a float cannot hold a bias."""
    return torch.promote_types(score.dtype, torch.float32)
