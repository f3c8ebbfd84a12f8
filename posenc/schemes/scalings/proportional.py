"""p-RoPE: the lowest frequencies do not rotate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.contract.checks import check_finite
from posenc.contract.fields import Positive
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class Proportional(Scaling, paper="Barbero et al. 2024, arXiv 2410.06205", trained=True):
    """p-RoPE: the first ``int(p D // 2)`` frequencies are divided by ``s``, the others are 0.

    Frequencies and pairs of channels are those of the whole head, ``D`` channels. That is not
    ``rotary_dim = p D``, which has other frequencies and other pairs.

    Parameters
    ----------
    p
        The part of the frequencies that stay, from 0 (NoPE) to 1 (RoPE). The paper prefers 0.75;
        Gemma 4 has 0.25.
    factor
        The factor ``s``.

    Section 6. HF: ``rope_type="proportional"``.
    """

    p: float = 0.75
    factor: Positive = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= check_finite("p", self.p) <= 1:
            raise ValueError(f"p must be from 0 to 1, got {self.p!r}")

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        kept = int(self.p * dim // 2)
        zeros = [Decimal(0)] * (dim // 2 - kept)
        return [*(f / Decimal(self.factor) for f in frequencies[:kept]), *zeros]
