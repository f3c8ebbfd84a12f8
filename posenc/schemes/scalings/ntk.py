"""NTK-aware scaling: a larger base, so that the lowest frequency is divided by the factor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.contract.fields import Positive
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class NTK(Scaling, paper="bloc97 2023; Peng et al. 2023, arXiv 2309.00071"):
    """NTK-aware scaling: the base becomes ``base * s**(D/(D-2))``, for ``D`` rotated channels.

    The highest frequency stays 1, and the lowest is divided by ``s``.

    Parameters
    ----------
    factor
        The factor ``s`` of the context's length. Left out in ``posenc.make``, it is
        ``max_len / train_len``, at least 1.

    The idea is bloc97's, 2023. Definition 1.
    """

    factor: Positive

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        return with_larger_base(frequencies, Decimal(self.factor), dim)


def with_larger_base(
    frequencies: Sequence[Decimal], factor: Decimal, dim: int
) -> Iterable[Decimal]:
    """The frequencies of a base times ``factor**(dim/(dim-2))``: ``f_k * factor**(-2k/(dim-2))``.

    With ``dim`` of 2 the only frequency is 1.
    """
    last = Decimal(max(1, len(frequencies) - 1))
    return (f * factor ** (-k / last) for k, f in enumerate(frequencies))
