"""How a bias reads arrays inside a kernel: one number for one pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.backend import Features, Params
from posenc_torch.flex.block_mask import row_index
from posenc_torch.flex.copies import copy_index


class HeadTable:
    """The table of one head inside a kernel: each index is one load from the whole array.

    ``copy`` is the index of the copy to load from, if the array has copies in its last axis.
    """

    def __init__(self, array: Tensor, head: Tensor, copy: Tensor | None = None) -> None:
        self._array, self._head = array, head
        self._copy = () if copy is None else (copy,)
        self.shape, self.dtype = tuple(array.shape[1 : array.ndim - len(self._copy)]), array.dtype

    def __getitem__(self, index: Any) -> Tensor:
        where = index if isinstance(index, tuple) else (index,)
        inside = (_clamp(i, size) for i, size in zip(where, self.shape, strict=True))
        return self._array[(self._head, *inside, *self._copy)]


class FixedReads:
    """A learned array of one head inside a kernel: each index is an array of its own.

    FlexAttention's backward pass allows one load of each array.
    """

    def __init__(self, params: HeadParams, name: str, shape: tuple[int, ...]) -> None:
        self._params, self._name, self.shape = params, name, shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        number: Tensor = self._params[number_name(self._name, index)]
        return number

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._params.dtype
        return dtype


def number_name(name: str, index: Any) -> str:
    """The name of the array that holds the numbers of one index of an array."""
    return f"{name}{index if isinstance(index, tuple) else (index,)}"


class TokenTable:
    """The table of one query or key inside a kernel: each index is one load."""

    def __init__(self, array: Tensor, where: tuple[Tensor, Tensor, Tensor]) -> None:
        self._array, self._where = array, where
        self.shape, self.dtype = tuple(array.shape[3:]), array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> Tensor:
        return self._array[(*self._where, _clamp(index, self.shape[0]))]


def _clamp(index: Any, size: int) -> Any:
    """An index inside a table: kernels load before they mask, so indices may lie outside."""
    return index if isinstance(index, int) else torch.clamp(index, 0, size - 1)


class TokenFeatures(Features):
    """Features of one query or key inside a kernel: each is loaded once, at its first read."""

    def __init__(
        self, arrays: Mapping[str, Tensor], role: str, b: Tensor, h: Tensor, index: Tensor
    ) -> None:
        super().__init__(arrays, role)
        self._at, self.index = (b, h, index), index
        self._views: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._views:
            array, (b, h, index) = super().__getitem__(name), self._at
            where = row_index(array, 0, b), row_index(array, 1, h), index
            self._views[name] = array[where] if array.ndim == 3 else TokenTable(array, where)
        return self._views[name]


class HeadParams(Params):
    """The params of one head inside a kernel: each is loaded once, at its first read.

    FlexAttention's backward pass allows one load of a learned array, and no load without a use.
    """

    def __init__(
        self,
        arrays: Mapping[str, Tensor],
        shared: Sequence[str],
        copied: Sequence[str],
        split: Mapping[str, tuple[int, ...]],
        head: Tensor,
        dtype: torch.dtype,
        query: TokenFeatures,
        key: TokenFeatures,
    ) -> None:
        super().__init__(arrays, dtype, query, key)
        self._shared, self._copied, self._split, self._head = shared, copied, split, head
        self._key_index = key.index
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._view(name)
        return self._loaded[name]

    def _view(self, name: str) -> Any:
        if (shape := self._split.get(name)) is not None:
            return FixedReads(self, name, shape) if shape else self[number_name(name, ())]
        array = self._arrays[name]
        if name in self._shared:
            return array
        head = row_index(array, 0, self._head)
        if name in self._copied:
            copy = copy_index(array, self._key_index)
            return array[head, copy] if array.ndim == 2 else HeadTable(array, head, copy)
        return array[head] if array.ndim == 1 else HeadTable(array, head)


def load_scalar(values: Tensor, head: Tensor) -> Tensor:
    """The first value, inside a kernel, where an index must be a tensor."""
    return values[torch.zeros_like(head)]
