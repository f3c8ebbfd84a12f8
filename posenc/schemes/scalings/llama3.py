"""Llama 3.1's scaling: low frequencies are interpolated, by wavelength."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.angles.fixed import TURN
from posenc.contract.fields import Count, Positive
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class Llama3(Scaling, paper="Grattafiori et al. 2024, arXiv 2407.21783"):
    """Llama 3.1: ``(1 - t) f / s + t f``, ``t = (L0/w - low) / (high - low)`` limited to [0, 1].

    ``w = 2 pi / f`` is the wavelength. So frequencies with more than ``high_freq_factor`` turns
    within ``L0`` stay, and those with less than ``low_freq_factor`` are divided by ``s``.

    Parameters
    ----------
    factor
        The factor ``s``. With both sizes, ``posenc.make`` takes ``max_len / train_len``, and at
        least 1.
    low_freq_factor, high_freq_factor
        Turns within ``L0`` between which the frequencies are blended; if both are equal, as in
        Llama 4 Scout, none is.
    train_len
        The length ``L0`` that the model was trained at before.

    The formula is in Meta's code.
    """

    factor: Positive = 8
    low_freq_factor: Positive = 1
    high_freq_factor: Positive = 4
    train_len: Count = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"high_freq_factor must be at least low_freq_factor={self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        low, high = Decimal(self.low_freq_factor), Decimal(self.high_freq_factor)
        for f in frequencies:
            turns = self.train_len * f / TURN
            t = (turns - low) / (high - low) if high > low else Decimal(turns >= low)
            t = min(max(t, Decimal(0)), Decimal(1))
            yield f * (t + (1 - t) / Decimal(self.factor))
