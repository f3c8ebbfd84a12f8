"""How often a bias loads its arrays for one pair: FlexAttention's backward pass takes one load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from posenc.backend import (
    Features,
    Params,
    PositionScheme,
)

_NONE: Mapping[str, Tensor] = {}


def loads(
    scheme: PositionScheme,
    arrays: Mapping[str, Tensor],
    query: Mapping[str, Tensor] = _NONE,
    key: Mapping[str, Tensor] = _NONE,
) -> list[str]:
    """The arrays and features that a scheme's bias loads more than once for one pair, or may.

    ``query`` and ``key`` are features of each side, which have the names of ``labelled``.
    """
    specs, shared = scheme.param_specs(), shared_by_heads(scheme)
    own = {n: a for n, a in arrays.items() if n not in shared}
    tables = {n: _Counted(a, a.shape[1:]) for n, a in own.items() if a.ndim > 1}
    known = labelled(query, key).items()
    rows = {n: _Counted(a, a.shape[3:]) for n, a in known if a.ndim > 3 and a.is_floating_point()}
    if not rows and not shared and not any(name in specs for name in tables):
        return []
    like = next(iter([*arrays.values(), *query.values(), *key.values()]))
    at = torch.zeros((), dtype=torch.int32, device=like.device)
    zero = at.to(torch.promote_types(like.dtype, torch.float32))
    rest = {n: a.new_zeros(a.shape if n in shared else ()) for n, a in arrays.items()}
    sides = []
    for role, side in (("query", query), ("key", key)):
        found = {n: rows.get(_label(n, role), zero) for n in side}
        places = {n: _Counted(a, a.shape[3:]) for n, a in side.items() if n == "places"}
        sides.append(Features(found | places, role))
    params = _Read(dict.fromkeys(scheme.constants(), zero) | rest | tables, zero.dtype, *sides)
    scheme.bias(at, at, params=params, xp=xp)
    # What heads share is loaded whole: once for every number that the bias takes of it, or more.
    read = [name for name in shared if name in params.read]
    return read + [name for name, table in (tables | rows).items() if table.loads > 1]


class _Read(Params):
    """Params that know which of them were asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def labelled(query: Mapping[str, Tensor], key: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Features of both sides, by names that tell the sides apart."""
    sides = (("query", query), ("key", key))
    return {_label(name, role): array for role, side in sides for name, array in side.items()}


def _label(name: str, role: str) -> str:
    return f"feature {name} of the {role}"


class _Counted:
    """A table of one head, or of one token, that holds zeros, and counts how often it is asked."""

    def __init__(self, array: Tensor, shape: tuple[int, ...]) -> None:
        self._zero, self.loads = array.new_zeros(()), 0
        self.shape, self.dtype = tuple(shape), array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> Tensor:
        self.loads += 1
        return self._zero


def shared_by_heads(scheme: PositionScheme) -> list[str]:
    """Learned arrays that every head gets whole."""
    return [name for name, spec in scheme.param_specs().items() if not spec.per_head]
