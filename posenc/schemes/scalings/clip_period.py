"""Clipping by period: frequencies that do not complete a turn in training do not rotate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.angles.fixed import TURN
from posenc.contract.fields import Count
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class ClipPeriod(Scaling, paper="Hua et al. 2024, arXiv 2412.17739", trained=True):
    """Frequencies whose period ``2 pi / f`` exceeds ``L0`` become 0.

    Parameters
    ----------
    train_len
        The length ``L0`` that the model is trained at.

    The clipping of FoPE, without its Fourier series.
    """

    train_len: Count

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        return (f if f * self.train_len >= TURN else Decimal(0) for f in frequencies)
