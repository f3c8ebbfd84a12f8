"""Tokens of one side for the laws, and what a bias reads of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np

from posenc.contract.params import Features
from posenc.contract.protocol import Role
from posenc.contract.tokens import Tokens
from posenc.testing.framework import Host, readonly

Index: TypeAlias = "int | slice | Host | tuple[Any, ...] | EllipsisType"


@dataclass(frozen=True, eq=False)
class RoleTokens:
    """Tokens, and whether they are queries or keys."""

    role: Role
    tokens: Tokens

    @property
    def pos(self) -> Host:
        """Positions ``(L,)`` or ``(B, L)``."""
        return np.asarray(self.tokens.pos)

    @property
    def features(self) -> Mapping[str, Host]:
        """By name, ``(B or 1, H or 1, L)`` or ``(B or 1, H or 1, L, M)``."""
        return self.tokens.features or {}

    @property
    def places(self) -> Host | None:
        """``(L, axes)`` or ``(B, L, axes)``, for a scheme of several axes."""
        places: Host | None = self.tokens.places
        return places

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self.pos.shape[-1])

    def take(self, index: Any) -> RoleTokens:
        """The tokens at ``index``."""
        features = {name: readonly(a[:, :, index]) for name, a in self.features.items()}
        places = None if self.places is None else self.places[..., index, :]
        return self._with(pos=self.pos[..., index], features=features, places=places)

    def row(self, row: int) -> RoleTokens:
        """The tokens of one sequence of a batch."""
        features = {
            name: a[row : row + 1] if len(a) > 1 else a for name, a in self.features.items()
        }
        places = self.places
        if places is not None and places.ndim == 3:
            places = places[row]
        pos = self.pos[row] if self.pos.ndim == 2 else self.pos
        return self._with(pos=pos, features=features, places=places)

    def shift(self, by: int) -> RoleTokens:
        """The same features, with ``by`` added to positions and places."""
        places = None if self.places is None else self.places + by
        return self._with(pos=self.pos + by, places=places)

    def _with(self, **facts: Any) -> RoleTokens:
        return replace(self, tokens=replace(self.tokens, **facts))

    def bias_reads(self, dtype: Any) -> dict[str, Host]:
        """The arrays that a bias reads: features in ``dtype``, and integer places."""
        arrays = {name: readonly(a.astype(dtype)) for name, a in self.features.items()}
        if self.places is not None:
            places = self.places if self.places.ndim == 3 else self.places[None]
            arrays["places"] = readonly(places[:, None])
        return arrays

    def of_head(self, head: int, index: Index, dtype: Any, row: int = 0) -> Features:
        """Features that the ``bias`` of one head reads at ``pos[index]`` of one sequence."""
        features: dict[str, Any] = {}
        for name, array in self.bias_reads(dtype).items():
            own = array[min(row, len(array) - 1), min(head, array.shape[1] - 1)]
            features[name] = Rows(own[index]) if own.ndim == 2 else np.asarray(own[index])
        return Features(features, self.role)


class Rows:
    """A table per token of one head, ``(..., M)``; ``rows[index]`` takes one entry of each."""

    def __init__(self, array: Host) -> None:
        self._array = array
        self.shape, self.dtype = (array.shape[-1],), array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> Host:
        if isinstance(index, int):
            return np.asarray(self._array[..., index])
        index = np.asarray(index)
        shape = np.broadcast_shapes(self._array.shape[:-1], index.shape)
        table = np.broadcast_to(self._array, (*shape, len(self)))
        at = np.broadcast_to(index, shape)[..., None].astype(np.int64)
        return np.asarray(np.take_along_axis(table, at, axis=-1)[..., 0])
