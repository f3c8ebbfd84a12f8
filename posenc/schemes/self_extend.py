"""Self-Extend: RoPE for near keys, and RoPE on groups of positions for far ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posenc.contract.fields import Count, Distance, Positive
from posenc.contract.protocol import Array, Namespace, PositionScheme, Role, Window
from posenc.schemes.moved_rope import MovedRoPE
from posenc.schemes.rope import Layout, RoPE


@dataclass(frozen=True)
class SelfExtend(PositionScheme, paper="Jin et al. 2024, arXiv 2401.01325", trained_as="rope"):
    """RoPE in which far keys have the distance of groups of ``G`` positions.

    A model then meets distances up to ``window + (L - window) / group`` only in a context of ``L``
    tokens.

    From distance ``w`` on, the query at ``i`` is as if at ``i // G + w - w // G``, the key at ``j``
    as if at ``j // G``. Keys after the query mirror those before it: their distance is the negative
    of what it would be with query and key swapped.

    Near keys and far keys are two calls of attention, merged by log-sum-exp; without a causal mask
    there are three. So cached keys are raw. For the log-position factor that the authors of ReRoPE
    add, write ``Sum(SelfExtend(...), LogScale("rerope", train_len))``.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``, even.
    group
        Positions of a group, ``G``.
    window
        The first distance that changes, ``w``. Left out in ``posenc.make``, it is a quarter of
        ``train_len``.
    base, layout
        As in ``RoPE``.

    Section 3.
    """

    head_dim: Count
    group: Distance = 8
    window: Distance = 1024
    base: Positive = 10_000.0
    layout: Layout = "half"
    _regions: tuple[tuple[PositionScheme, Window], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        settings = self.head_dim, self.base, self.layout
        near, w, g = RoPE(*settings), self.window, self.group
        before, after = (_Grouped(*settings, group=g, ahead=n) for n in (w - w // g, w // g - w))
        regions = (near, (w - 1, w - 1)), (before, (None, -w)), (after, (-w, None))
        object.__setattr__(self, "_regions", regions)

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        return {"window": max(1, sizes["train_len"] // 4)} if "train_len" in sizes else {}

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        return self._regions


@dataclass(frozen=True)
class _Grouped(MovedRoPE):
    """RoPE of groups of positions, with queries a number of groups ahead."""

    group: int = 1
    ahead: int = 0

    def moved(self, pos: Array, role: Role, xp: Namespace) -> Array:
        return pos // self.group + (self.ahead if role == "query" else 0)
