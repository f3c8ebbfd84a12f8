"""YaRN: high frequencies stay, low ones are interpolated, and attention gets sharper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Literal

from posenc.angles.fixed import TURN
from posenc.contract.checks import check_finite
from posenc.contract.fields import Count, Positive
from posenc.schemes.scalings.scaling import Scaling

Ramp = Literal["index", "turns"]
AppliedTo = Literal["angles", "scale"]


@dataclass(frozen=True)
class YaRN(Scaling, paper="Peng et al. 2023, arXiv 2309.00071"):
    """YaRN: ``(1 - g) f / s + g f``, where ``g`` falls from 1 at high frequencies to 0 at low ones.

    A frequency makes ``r = L0 f / 2 pi`` turns within the training length. ``g`` is 1 above
    ``beta_fast`` turns and 0 below ``beta_slow``. Cosines and sines are multiplied by
    ``m(s) = 0.1 ln(s) + 1``, so scores get its square.

    Parameters
    ----------
    factor
        The factor ``s`` of the context's length. Left out in ``posenc.make``, it is
        ``max_len / train_len``, at least 1.
    train_len
        The length ``L0`` that the model was trained at.
    beta_fast, beta_slow
        Turns within ``L0`` above which a frequency stays, and below which it is divided by ``s``.
        Both may be equal, as in Kimi K2.
    attention_factor
        The factor of cosines and sines, instead of ``m(s)``.
    mscale, mscale_all_dim
        If both are given and not 0, the factor is ``m(s, mscale) / m(s, mscale_all_dim)``, with
        ``m(s, c) = 0.1 c ln(s) + 1``.
    truncate
        Whether the ramp ``"index"`` starts and ends at whole numbers (gpt-oss: False).
    ramp
        What ``g`` is linear in. ``"index"``: the index ``k`` of the frequency, between the indices
        of ``beta_fast`` turns (at least 0) and ``beta_slow`` turns (at most ``D - 1``), as in the
        released code and HF.
        ``"turns"``: ``r`` (the paper, equation 13).
    apply_to
        ``"angles"``: the factor is that of cosines and sines. ``"scale"``: the softmax scale gets
        ``m(s, mscale_all_dim)**2`` besides (DeepSeek). Without ``mscale_all_dim`` the softmax scale
        gets the square of the factor, and cosines and sines get none.

    Equations 13 to 15.
    """

    factor: Positive
    train_len: Count
    beta_fast: Positive = 32
    beta_slow: Positive = 1
    attention_factor: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    ramp: Ramp = "index"
    apply_to: AppliedTo = "angles"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_slow > self.beta_fast:
            raise ValueError(
                f"beta_fast must be at least beta_slow={self.beta_slow}, got {self.beta_fast}"
            )
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None and check_finite(name, getattr(self, name)) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        kept = self._by_turns(frequencies) if self.ramp == "turns" else self._by_index(base, dim)
        s = Decimal(self.factor)
        return (f * (g + (1 - g) / s) for f, g in zip(frequencies, kept, strict=True))

    def _by_turns(self, frequencies: Sequence[Decimal]) -> Iterable[Decimal]:
        fast, slow = Decimal(self.beta_fast), Decimal(self.beta_slow)
        turns = (self.train_len * f / TURN for f in frequencies)
        if fast == slow:
            return (Decimal(r >= slow) for r in turns)
        return (_clip((r - slow) / (fast - slow)) for r in turns)

    def _by_index(self, base: Decimal, dim: int) -> Iterable[Decimal]:
        if base <= 1:
            raise ValueError(f"base must exceed 1 under YaRN's ramp 'index', got {float(base)}")

        def index(turns: float) -> Decimal:
            """The index of the frequency that makes so many turns within the training length."""
            ratio = self.train_len / (Decimal(turns) * TURN)
            return dim * ratio.ln() / (2 * base.ln())

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = low.to_integral(ROUND_FLOOR), high.to_integral(ROUND_CEILING)
        low, high = max(low, Decimal(0)), min(high, Decimal(dim - 1))
        if low == high:  # as released, against a division by zero
            high += Decimal("0.001")
        return (1 - _clip((k - low) / (high - low)) for k in range(dim // 2))

    @property
    def amplitude(self) -> float:
        return 1.0 if self._all_in_scale() else self._factor()

    @property
    def score_factor(self) -> float:
        if self._all_in_scale():
            return self._factor() ** 2
        in_scale = self.apply_to == "scale"
        return self._m(self.mscale_all_dim or 0.0) ** 2 if in_scale else 1.0

    def _all_in_scale(self) -> bool:
        return self.apply_to == "scale" and not self.mscale_all_dim

    def _factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    def _m(self, weight: float) -> float:
        """``m(s, weight)``; 1 if the context is not longer."""
        return 0.1 * weight * math.log(max(self.factor, 1)) + 1


def _clip(value: Decimal) -> Decimal:
    return min(max(value, Decimal(0)), Decimal(1))
