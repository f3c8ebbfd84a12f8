"""Positions in fractions of a token, as V2PE gives to the tokens of images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.contract.fields import Count
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class Fractional(Scaling, trained=True, paper="Ge et al. 2024, arXiv 2412.09616"):
    """Positions are multiples of ``1 / n``: a token at the integer ``p`` turns as at ``p / n``.

    In V2PE, a token of text advances the position by 1, and a token of an image by ``d``, one of
    ``1, 1/2, .. 1/256``. ``posenc.positions.fractional`` makes the integers, which are exact, from
    such advances. Give them as places, because masks and caches count tokens:
    ``attention(..., RoPE(64, scaling=Fractional()), q_axes=places, k_axes=places)``. Without
    places, a token is ``1 / n`` from the next.

    Parameters
    ----------
    denominator
        The number ``n`` of steps in a position.

    Section 3.
    """

    denominator: Count = 256

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        return (f / self.denominator for f in frequencies)
