"""RoPE: rotary position embedding.

Channel pairs of queries and keys rotate by the angle ``pos * base**(-2k/D)``. Their dot product
then depends on positions only through the difference.

Su et al. 2021, "RoFormer", arXiv 2104.09864, equation 34.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, Literal, get_args

from posenc.angles import Turns, frequencies
from posenc.checks import check_choice, check_count, check_positive
from posenc.protocol import Array, Namespace, PositionScheme, Role

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class RoPE(PositionScheme):
    """Rotation of channel pairs by ``pos * base**(-2k/R)``, ``k = 0 .. R/2 - 1``.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``, even.
    base
        Base of the frequencies.
    layout
        Which channels pair up: ``"half"``, ``(k, k + R/2)`` (HF Llama, NeoX); ``"interleaved"``,
        ``(2k, 2k + 1)`` (Meta Llama, GPT-J).
    rotary_dim
        Only the first ``R`` channels rotate (GPT-J, NeoX); even, at most ``D``. Default: all.

    Su et al. 2021, arXiv 2104.09864.
    """

    paper: ClassVar[str] = "Su et al. 2021, arXiv 2104.09864"

    head_dim: int
    base: float = 10_000.0
    layout: Layout = "half"
    rotary_dim: int | None = None
    _turns: Turns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("head_dim", self.head_dim)
        check_positive("base", self.base)
        check_choice("layout", self.layout, get_args(Layout))
        name, dim = ("head_dim", self.head_dim)
        if self.rotary_dim is not None:
            name, dim = "rotary_dim", check_count("rotary_dim", self.rotary_dim)
        if dim % 2:
            raise ValueError(f"{name} must be even, got {dim}: rotation acts on pairs of channels")
        if dim > self.head_dim:
            raise ValueError(f"rotary_dim must be at most head_dim={self.head_dim}, got {dim}")
        turns = Turns(frequencies(self.base, (Fraction(2 * k, dim) for k in range(dim // 2))))
        object.__setattr__(self, "_turns", turns)

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Array:
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"x has {x.shape[-1]} channels, the scheme head_dim={self.head_dim}")
        # Rotated in float32 or better; the cast to a half-precision dtype is the last step.
        work = xp.float64 if x.dtype == xp.float64 else xp.float32
        sin, cos = self._turns.sincos(pos, dtype=work, xp=xp)
        rotary, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim or self.head_dim :]
        rotated = xp.astype(_LAYOUTS[self.layout](xp.astype(rotary, work), sin, cos, xp), x.dtype)
        return rotated if self.rotary_dim is None else xp.concat([rotated, rest], axis=-1)


def _half(x: Array, sin: Array, cos: Array, xp: Namespace) -> Array:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return xp.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _interleaved(x: Array, sin: Array, cos: Array, xp: Namespace) -> Array:
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = xp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return xp.reshape(pairs, x.shape)


_LAYOUTS = {"half": _half, "interleaved": _interleaved}
