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
from posenc_torch.sight import BLOCK, Places, padded

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


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
    """A scheme's bias where FlexAttention asks for it."""

    scheme: PositionScheme
    arrays: Mapping[str, Tensor]
    dtype: torch.dtype
    q: Places
    k: Places
    coords: tuple[Tensor, Tensor] | None

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score with the bias of head ``h`` added."""
        params = HeadParams(self.arrays, shared_by_heads(self.scheme), h, self.dtype)
        bias = scheme_bias(self.scheme, *self._at(b, h, i, j), params, xp=xp)
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
        What ``i - j`` has in the table; a tensor where it depends on lengths, for a number compiles
        anew.
    """

    table: Tensor
    offset: Tensor | int

    @classmethod
    def of(cls, call: Call, by_distance: Tensor) -> ByDistance:
        """From the bias at the distances ``1 - K .. Q - 1`` of ``k_pos - q_pos``."""
        q_len, k_len = call.q.shape[2], call.k.shape[2]
        back = by_distance.flip(-1)
        ahead = q_len - 1  # so many of them are distances to later keys
        if call.causal:
            back, ahead = back[:, ahead:], 0
        table = padded(torch.nn.functional.pad(back, (BLOCK, BLOCK)))
        if call.causal and q_len == k_len:
            return cls(table, BLOCK)
        return cls(table, call.q_pos[0] + (BLOCK + ahead))  # the first of them stands at K - Q

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score with the bias of head ``h`` added."""
        bias = self.table[_row_of(self.table, h), i - j + self.offset]
        return score.to(_wide(score)) + bias.to(_wide(score))


def apart(q_coords: Tensor, k_coords: Tensor) -> tuple[Tensor, Tensor]:
    """Copies, also where both are one: a backward pass takes one load of each."""
    return padded(q_coords).clone(), padded(k_coords)


def _row_of(array: Tensor, head: Tensor) -> Tensor:
    """The head's own row, or the one that all heads have."""
    return torch.zeros_like(head) if array.shape[0] == 1 else head


def _wide(score: Tensor) -> torch.dtype:
    """At least float32: a score is traced in q's dtype, and half a float cannot hold a bias."""
    return torch.promote_types(score.dtype, torch.float32)
