"""NTK-mixed: between NTK-aware scaling and position interpolation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.contract.fields import Positive
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class NTKMixed(Scaling, paper="Su 2023, kexue.fm/archives/9706"):
    """NTK-mixed: ``f_k exp(-a k**0.75)``, ``k = 1 .. D/2``, with ``a = ln(s) / (D/2)**0.75``.

    ``f_1`` is the highest frequency, and ``D`` the number of rotated channels. The lowest frequency
    is divided by ``s``.

    Parameters
    ----------
    factor
        The factor ``s`` of the context's length. Left out in ``posenc.make``, it is
        ``max_len / train_len``, at least 1.

    The exponent 0.75 is that of the author's code, which also multiplies queries:
    ``LogScale("rerope", train_len=...)``.
    """

    factor: Positive

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        s, power, n = Decimal(self.factor), Decimal("0.75"), len(frequencies)
        return (f * s ** -((Decimal(k) / n) ** power) for k, f in enumerate(frequencies, 1))
