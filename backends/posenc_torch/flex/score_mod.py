"""A scheme's bias as FlexAttention asks for it: a function of a score and four indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor

from posenc.backend import (
    Call,
    Features,
    Params,
    PositionScheme,
    scheme_bias,
)
from posenc_torch.flex.block_mask import (
    BLOCK,
    Places,
    captured,
    captured_pairs,
    constant,
    numbers,
    row_of,
)
from posenc_torch.flex.params import shared_by_heads

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
    if isinstance(value, PositionScheme):
        return _fixed(value)
    if type(value) is not int:
        return value
    return len(range(value)) if value >= 0 else -len(range(-value))


class HeadRow:
    """The table of one head, chosen inside a kernel: each answer is one load of the whole array."""

    def __init__(self, array: Tensor, head: Tensor) -> None:
        self._array, self._head = array, head
        self.shape, self.dtype = tuple(array.shape[1:]), array.dtype

    def __getitem__(self, index: Any) -> Tensor:
        where = index if isinstance(index, tuple) else (index,)
        inside = (_inside(i, size) for i, size in zip(where, self.shape, strict=True))
        return self._array[(self._head, *inside)]


class TokenRow:
    """The table of one query or key, chosen inside a kernel: each answer is one load."""

    def __init__(self, array: Tensor, where: tuple[Tensor, Tensor, Tensor]) -> None:
        self._array, self._where = array, where
        self.shape, self.dtype = tuple(array.shape[3:]), array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> Tensor:
        return self._array[(*self._where, _inside(index, self.shape[0]))]


def _inside(index: Any, size: int) -> Any:
    """An index into a table: loads come before the mask, and beyond the end it may be anything."""
    return index if isinstance(index, int) else torch.clamp(index, 0, size - 1)


class Loaded(Features):
    """Features of one query or key inside a kernel: each loaded when first asked for, and once."""

    def __init__(
        self, found: Mapping[str, Tensor], role: str, b: Tensor, h: Tensor, index: Tensor
    ) -> None:
        super().__init__(found, role)
        self._at = b, h, index
        self._views: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._views:
            array, (b, h, index) = super().__getitem__(name), self._at
            where = row_of(array, 0, b), row_of(array, 1, h), index
            self._views[name] = array[where] if array.ndim == 3 else TokenRow(array, where)
        return self._views[name]


class HeadParams(Params):
    """The params of one head: each loaded when first asked for, and once.

    FlexAttention's backward pass takes one load of an array that learns, and none without a use.
    """

    def __init__(
        self,
        arrays: Mapping[str, Tensor],
        whole: Sequence[str],
        head: Tensor,
        dtype: torch.dtype,
        query: Loaded,
        key: Loaded,
    ) -> None:
        super().__init__(arrays, dtype, query, key)
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
        head = row_of(array, 0, self._head)
        return array[head] if array.ndim == 1 else HeadRow(array, head)


class Bias(NamedTuple):
    """A scheme's bias where FlexAttention asks for it; the scheme itself or its name."""

    known: PositionScheme | str
    arrays: Mapping[str, Tensor]
    dtype: torch.dtype
    q: Places
    k: Places
    query: Mapping[str, Tensor]
    key: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        scheme: PositionScheme,
        arrays: Mapping[str, Tensor],
        dtype: torch.dtype,
        where: tuple[Places, Places],
        features: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = ({}, {}),
        *,
        batch: int | None = None,
    ) -> Bias:
        """From the parts of a call: what it reads as positions, and features of both sides."""
        own = _features(features, batch)
        return cls(_known(scheme), _of_known_size(arrays), dtype, *where, *own)

    @property
    def scheme(self) -> PositionScheme:
        """Whose bias it is."""
        return _NAMED[self.known] if isinstance(self.known, str) else self.known

    @property
    def gathers(self) -> bool:
        """Whether each pair may load a number of its own."""
        tables = (*self.query.values(), *self.key.values())
        return any(a.ndim == 4 and a.is_floating_point() for a in tables)

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score with the bias of head ``h`` added."""
        scheme = self.scheme
        sides = Loaded(self.query, "query", b, h, i), Loaded(self.key, "key", b, h, j)
        params = HeadParams(self.arrays, shared_by_heads(scheme), h, self.dtype, *sides)
        bias = scheme_bias(scheme, self.q.at(b, i), self.k.at(b, j), params, xp=xp)
        if bias is None:
            return score
        found: Tensor = score.to(_wide(score)) + bias.to(_wide(score))
        return found


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

    @property
    def gathers(self) -> bool:
        """Whether each pair may load a number of its own."""
        return True

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
        return cls(table, captured(call.query.pos[:1] + (BLOCK + ahead)))

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score with the bias of head ``h`` added."""
        offset = BLOCK if self.offset is None else _only(self.offset, h)
        bias = self.table[row_of(self.table, 0, h), i - j + offset]
        return score.to(_wide(score)) + bias.to(_wide(score))


class Scored(NamedTuple):
    """Scores times a number of the call, capped, and then with what is added to them.

    Attributes
    ----------
    scale, cap
        Numbers of the call, as ``numbers`` has them, or None.
    bias
        The scheme's, or None.
    extra_bias
        The caller's ``(B or 1, H or 1, Q, K)``, ``captured``, or None.
    """

    scale: Tensor | None
    cap: Tensor | None
    bias: Bias | ByDistance | None
    extra_bias: Tensor | None

    @property
    def gathers(self) -> bool:
        """Whether each pair may load a number of its own."""
        return self.extra_bias is not None or (self.bias is not None and self.bias.gathers)

    @classmethod
    def of(cls, call: Call, bias: Bias | ByDistance | None, *, scaled: bool) -> Scored:
        """From a call, of which FlexAttention has ``scaled`` the scores, or has not."""

        def number(value: float | None) -> Tensor | None:
            device = call.q.device
            return None if value is None else numbers(value, dtype=torch.float32, device=device)

        scale, cap = number(None if scaled else call.scale), number(call.softcap)
        return cls(
            scale, cap, bias, None if call.extra_bias is None else captured_pairs(call.extra_bias)
        )

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score, scaled and capped, with the bias of head ``h`` and the caller's added."""
        score = score.to(_wide(score))
        if self.scale is not None:
            score = score * _only(self.scale, h)
        if self.cap is not None:
            cap = _only(self.cap, h)
            score = cap * torch.tanh(score / cap)
        if self.bias is not None:
            score = self.bias.score_mod(score, b, h, i, j)
        if self.extra_bias is not None:
            score = (
                score
                + self.extra_bias[
                    row_of(self.extra_bias, 0, b), row_of(self.extra_bias, 1, h), i, j
                ]
            )
        return score


def _features(
    sides: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], batch: int | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Features of both sides as a kernel captures them.

    Copies, also where both sides have the same: a backward pass takes one load of each.
    """
    query, key = (
        {name: _of_tokens(array, batch) for name, array in side.items()} for side in sides
    )
    copies = {name: array.clone() for name, array in query.items()}
    # A copy has no marks.
    return {n: constant(a) if a.device.type == "cpu" else a for n, a in copies.items()}, key


def _of_tokens(array: Tensor, batch: int | None) -> Tensor:
    """``(B or 1, H or 1, L)`` or ``(B or 1, H or 1, L, M)``; a CPU's has ``batch`` rows."""
    if array.device.type == "cpu":
        if not array.dtype.is_floating_point:  # places: one kernel for all kinds of integers
            array = array.to(torch.int32)
        if batch is not None:
            array = array.expand(batch, *array.shape[1:])
    return captured(array, rows=array.shape[0] != 1 or batch is not None, axis=2)


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


def _wide(score: Tensor) -> torch.dtype:
    """At least float32: a score is traced in q's dtype, and half a float cannot hold a bias."""
    return torch.promote_types(score.dtype, torch.float32)
