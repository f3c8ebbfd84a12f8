"""Sinusoidal absolute positions, added to token embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from posenc.angles.fixed import Turns, frequencies
from posenc.contract.fields import Count, Positive
from posenc.contract.params import float_dtype
from posenc.contract.protocol import Array, Arrays, Namespace, PositionScheme

Layout = Literal["interleaved", "concatenated", "tensor2tensor"]


@dataclass(frozen=True)
class Sinusoidal(PositionScheme, paper="Vaswani et al. 2017, arXiv 1706.03762"):
    """Sines and cosines of ``pos * base**(-2k/d)``, ``k = 0 .. d/2 - 1``, as an embedding.

    Parameters
    ----------
    dim
        Width ``d`` of the embedding, even.
    base
        Base of the frequencies.
    layout
        ``"interleaved"``: sine and cosine alternate (the paper). ``"concatenated"``: all sines,
        then all cosines. ``"tensor2tensor"``: concatenated, with frequencies
        ``base**(-k/(d/2 - 1))``, for ``d`` of at least 4.

    Section 3.5.
    """

    dim: Count
    base: Positive = 10_000.0
    layout: Layout = "interleaved"
    _turns: Turns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ValueError(f"dim must be even, got {self.dim}: sines and cosines come in pairs")
        if self.layout == "tensor2tensor" and self.dim < 4:
            raise ValueError(f"dim must be at least 4 in layout 'tensor2tensor', got {self.dim}")
        object.__setattr__(self, "_turns", Turns(self.frequencies()))

    def frequencies(self) -> tuple[Decimal, ...]:
        """The ``d/2`` frequencies, in radians per position, to 60 digits."""
        n = self.dim // 2
        steps = n - (self.layout == "tensor2tensor")
        return frequencies(self.base, (Fraction(k, steps) for k in range(n)))

    def embedding(self, pos: Array, *, params: Arrays, xp: Namespace) -> Array:
        sin, cos = self._turns.sincos(pos, dtype=float_dtype(params, xp), xp=xp)
        if self.layout == "interleaved":
            return xp.reshape(xp.stack([sin, cos], axis=-1), (*pos.shape, self.dim))
        return xp.concat([sin, cos], axis=-1)
