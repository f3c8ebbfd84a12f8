"""How often a bias loads its arrays for one pair: FlexAttention's backward pass takes one load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from posenc.evaluate import is_gated
from posenc.params import Params
from posenc.protocol import PositionScheme


def loads(scheme: PositionScheme, arrays: Mapping[str, Tensor]) -> list[str]:
    """The arrays that a scheme's bias loads more than once for one pair, or may."""
    specs, shared = scheme.param_specs(), shared_by_heads(scheme)
    tables = {n: _Counted(a) for n, a in arrays.items() if n not in shared and a.ndim > 1}
    if not any(name in specs for name in tables):
        return shared
    like = next(iter(arrays.values()))
    rest = {n: a.new_zeros(a.shape if n in shared else ()) for n, a in arrays.items()}
    at = torch.zeros((), dtype=like.dtype if is_gated(scheme) else torch.int32, device=like.device)
    scheme.bias(at, at, params=Params(rest | tables, like.dtype), xp=xp)
    return shared + [name for name, table in tables.items() if table.loads > 1]


class _Counted:
    """A table of one head that holds zeros, and counts how often it is asked."""

    def __init__(self, array: Tensor) -> None:
        self._zero, self.loads = array.new_zeros(()), 0
        self.shape, self.dtype = tuple(array.shape[1:]), array.dtype

    def __getitem__(self, index: Any) -> Tensor:
        self.loads += 1
        return self._zero


def shared_by_heads(scheme: PositionScheme) -> list[str]:
    """Learned arrays that every head gets whole."""
    return [name for name, spec in scheme.param_specs().items() if not spec.per_head]
