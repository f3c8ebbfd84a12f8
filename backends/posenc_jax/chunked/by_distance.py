"""A bias of many operations as a table by distance, where it depends on distance alone.

A tile computes the bias of its pairs, which costs little beside its scores. A sum of 64 cosines
does not. XLA would compute it for every pair even if it is written per distance, so the table is
made before the loop over tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from jax import Array

from posenc import ParamSpec
from posenc.backend import (
    Call,
    Namespace,
    PositionScheme,
    bias_by_distance,
)
from posenc_jax.operations import is_cheaper_by_distance


@dataclass(frozen=True)
class _ByDistance(PositionScheme):
    """``bias = table[h, k - q + ahead]``."""

    relative: ClassVar[bool] = True
    shape: tuple[int, int]
    ahead: int

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"table": ParamSpec(self.shape)}

    def bias(self, q: Array, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        return params["table"][k - q + self.ahead]


def with_table(call: Call) -> Call:
    """The call with a table by distance as its scheme, if its bias has many operations."""
    if not is_cheaper_by_distance(call):
        return call
    table = bias_by_distance(call)
    assert table is not None
    scheme = _ByDistance(table.shape, call.k.shape[2] - 1)
    return replace(call, scheme=scheme, arrays={"table": table})
