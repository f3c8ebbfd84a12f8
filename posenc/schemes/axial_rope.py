"""Axial RoPE: each axis of an image rotates its own share of the channel pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posenc.contract.checks import check_channels
from posenc.contract.fields import Count, Positive
from posenc.contract.protocol import Array, Arrays, Namespace, PositionScheme, Role
from posenc.schemes.rope import Layout, RoPE, rotate


@dataclass(frozen=True)
class AxialRoPE(PositionScheme, paper="Heo et al. 2024, arXiv 2403.13298"):
    """RoPE on several axes: of ``D/2`` channel pairs, the first ``D/2A`` turn by the first axis.

    With ``A`` axes and ``n = D/2A``, pair ``a n + k`` turns by ``place[a] * base**(-k/n)``,
    ``k = 0 .. n - 1``; on two axes that is ``base**(-4k/D)``. So each axis has every frequency of
    a RoPE of ``D/A`` channels. Text, with the same coordinate on each axis, is rotated as ``A``
    such RoPEs side by side, and not as one RoPE of ``D`` channels.

    Angles are as exact as those of ``RoPE``. ``posenc.positions.grid`` makes places ``(row,
    column)``. In the authors' code (rope-vit) the first axis is the column: ``grid(...)[:, ::-1]``.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``, a multiple of ``2A``.
    axes
        Number of axes, ``A``.
    base
        Base of the frequencies.
    layout
        Which channels pair up: ``"interleaved"``, ``(2k, 2k + 1)`` (rope-vit); ``"half"``,
        ``(k, k + D/2)`` (image parts of Qwen2-VL and others, with ``base=10_000`` and places
        ``(row, column)``).

    Section 3.2.
    """

    head_dim: Count
    axes: Count = 2
    base: Positive = 100.0
    layout: Layout = "interleaved"
    _rope: RoPE = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_pairs(self.head_dim, self.axes)
        object.__setattr__(self, "_rope", RoPE(self.head_dim // self.axes, self.base))

    def frequencies(self) -> tuple[float, ...]:
        """The ``D/2A`` frequencies of each axis, in radians per step."""
        return self._rope.frequencies()

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("x", x, self.head_dim)
        tables = self.tables(x, pos, params=params, xp=xp)
        return rotate(x, tables["sin"], tables["cos"], layout=self.layout, xp=xp)

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        # With one axis, ``pos`` has no axis for it.
        lead = pos.shape if self.axes == 1 else pos.shape[:-1]
        # (..., A, D/2A): the pairs of one axis are neighbours.
        angles = self._rope.sincos(pos[..., None], params, dtype=dtype, xp=xp)
        sin, cos = (xp.reshape(a, (*lead, self.head_dim // 2)) for a in angles)
        return {"sin": sin, "cos": cos}


def check_pairs(head_dim: int, axes: int) -> None:
    """Check that each axis gets the same number of channel pairs."""
    if head_dim % (2 * axes):
        raise ValueError(
            f"head_dim must be a multiple of {2 * axes}, got {head_dim}: each of axes={axes} "
            "rotates as many pairs of channels"
        )
