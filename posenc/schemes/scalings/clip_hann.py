"""CoPE's clipping: frequencies that do not complete a turn in training are tapered to 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.angles.fixed import TURN, cosine
from posenc.contract.fields import Count
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class ClipHann(Scaling, paper="CoPE 2026, arXiv 2602.05258", trained=True):
    """``f_k (1 + cos(pi (k - k_c) / (n - 1 - k_c))) / 2`` from ``k_c`` on, for ``n`` frequencies.

    ``k_c`` is the first frequency whose period ``2 pi / f`` exceeds ``L0``. It stays, and the
    lowest becomes 0. If they are the same one, it stays.

    Parameters
    ----------
    train_len
        The length ``L0`` that the model is trained at.

    The authors' code for Llama 3 tapers its last 20 frequencies; this rule tapers 29 at length
    8192.
    """

    train_len: Count

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        clipped = (k for k, f in enumerate(frequencies) if f * self.train_len < TURN)
        first = next(clipped, len(frequencies))
        steps = max(1, len(frequencies) - 1 - first)
        # (1 - cos(pi - x)) / 2, because it is exactly 0 at the end.
        tapers = [(1 - cosine(TURN * m / (2 * steps))) / 2 for m in range(steps, -1, -1)]
        rest = frequencies[first:]
        return [*frequencies[:first], *(f * t for f, t in zip(rest, tapers, strict=False))]
