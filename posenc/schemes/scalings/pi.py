"""Position interpolation: all frequencies are divided by one factor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.contract.fields import Positive
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class PI(Scaling, paper="Chen et al. 2023, arXiv 2306.15595"):
    """Position interpolation: ``f / s``, so that ``s`` times as many positions fit.

    Parameters
    ----------
    factor
        The factor ``s`` of the context's length. Left out in ``posenc.make``, it is
        ``max_len / train_len``, at least 1.

    Equation 4. HF: ``rope_type="linear"``.
    """

    factor: Positive

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        return (f / Decimal(self.factor) for f in frequencies)
