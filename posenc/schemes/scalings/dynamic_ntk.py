"""Dynamic NTK: NTK-aware scaling by as much as the present length needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from posenc.contract.fields import Count, Positive
from posenc.schemes.scalings.ntk import with_larger_base
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class DynamicNTK(Scaling, paper="emozilla 2023; Peng et al. 2023, arXiv 2309.00071"):
    """Dynamic NTK: the base becomes ``base * (s L/L0 - (s-1))**(D/(D-2))``, ``D`` channels rotated.

    ``L`` is the length of the context, at least ``L0``. Frequencies are those of plain RoPE until
    ``at_length(L)`` says that the context is longer than ``L0``. Keys that were rotated for one
    ``L`` do not fit queries rotated for another: keep one length for a cache, or cache keys before
    their rotation.

    Parameters
    ----------
    factor
        The factor ``s``. Left out in ``posenc.make``, it is
        ``max_len / train_len``, at least 1.
    train_len
        The length ``L0`` that the model was trained at.
    length
        The length ``L``, as ``at_length`` sets it. Default: at most ``train_len``.

    The idea is emozilla's, 2023. Section 3.3; the formula is HF's, ``rope_type="dynamic"``.
    """

    factor: Positive
    train_len: Count
    length: Count | None = None

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        ratio = Decimal(max(self.length or 0, self.train_len)) / self.train_len
        return with_larger_base(frequencies, Decimal(self.factor) * (ratio - 1) + 1, dim)

    def at_length(self, length: int) -> DynamicNTK:
        longer = length if length > self.train_len else None
        return self if longer == self.length else replace(self, length=longer)
