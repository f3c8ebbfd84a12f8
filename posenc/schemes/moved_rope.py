"""RoPE at other positions than a token's own, for regions that see keys elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from posenc.contract.checks import check_channels
from posenc.contract.protocol import Array, Arrays, Namespace, Role
from posenc.schemes.rope import RoPE, rotate


@dataclass(frozen=True)
class MovedRoPE(RoPE):
    """RoPE that turns queries and keys at other positions than their own: a region's."""

    def moved(self, pos: Array, role: Role, xp: Namespace) -> Array | None:
        """The positions at which tokens are turned; None for no turn."""
        raise NotImplementedError

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("x", x, self.head_dim)
        tables = self.tables(x, pos, params=params, xp=xp)
        if f"{role}_sin" not in tables:
            return x
        sin, cos = tables[f"{role}_sin"], tables[f"{role}_cos"]
        return rotate(x, sin, cos, layout=self.layout, xp=xp)

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        tables: dict[str, Array] = {}
        for role in get_args(Role):
            at = self.moved(pos, role, xp)
            if at is not None:
                own = super().rotary(at, dtype=dtype, params=params, xp=xp)
                tables |= {f"{role}_{name}": table for name, table in own.items()}
        return tables
