"""LongRoPE: each frequency has divisors of its own, for short and for long contexts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from posenc.contract.checks import check_count, check_positive
from posenc.contract.fields import Count, Positive
from posenc.schemes.scalings.scaling import Scaling


@dataclass(frozen=True)
class LongRoPE(Scaling, paper="Ding et al. 2024, arXiv 2402.13753"):
    """LongRoPE: ``f_k / short_factor[k]`` up to length ``L0``, ``f_k / long_factor[k]`` beyond.

    Cosines and sines are multiplied by ``sqrt(1 + ln(s) / ln(L0))``, at every length. The short
    list serves until ``at_length(L)`` says that the context is longer than ``L0``. Keys rotated by
    one list do not fit queries rotated by the other.

    Parameters
    ----------
    short_factor, long_factor
        Divisors, one per frequency: half the number of rotated channels. ``posenc.make`` takes 1
        and ``s**(k/(n-1))``, where the paper has results of a search.
    train_len
        The length ``L0`` that the model was trained at.
    factor
        How many times longer than ``L0`` the extended context is, ``s``. Default: 1, so that
        cosines and sines get no factor.
    attention_factor
        The factor of cosines and sines, instead of the one that follows from ``factor``.
    length
        The length of the context, as ``at_length`` sets it. Default: at most ``train_len``.

    The factor is in the code of Phi-3.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    train_len: int
    factor: Positive | None = None
    attention_factor: Positive | None = None
    length: Count | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            given = getattr(self, name)
            if isinstance(given, str) or not hasattr(given, "__len__"):
                raise TypeError(f"{name} must be a sequence of numbers, got {given!r}")
            object.__setattr__(self, name, tuple(given))
        super().__post_init__()
        for name in ("short_factor", "long_factor"):
            for divisor in getattr(self, name):
                check_positive(name, divisor)
        check_count("train_len", self.train_len, least=2)  # its logarithm divides

    @classmethod
    def fitted(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Divisors without a search: all 1 for short contexts, those of NTK-aware scaling beyond.

        The latter are ``s**(k/(n-1))`` for ``n`` frequencies.
        """
        fitted = super().fitted(given)
        s = {**fitted, **given}.get("factor")
        dim = given.get("rotary_dim") or given.get("head_dim")
        if s is None or not isinstance(dim, int):
            return fitted
        n = dim // 2
        long = tuple(s ** (k / max(1, n - 1)) for k in range(n))
        return {**fitted, "short_factor": (1.0,) * n, "long_factor": long}

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        for name in ("short_factor", "long_factor"):
            if (given := len(getattr(self, name))) != dim // 2:
                raise ValueError(
                    f"{name} must have {dim // 2} numbers, one per pair of rotated channels, "
                    f"got {given}"
                )
        long = self.length is not None and self.length > self.train_len
        divisors = self.long_factor if long else self.short_factor
        return (f / Decimal(d) for f, d in zip(frequencies, divisors, strict=True))

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        s = max(self.factor or 1.0, 1.0)
        return 1.0 if s == 1 else math.sqrt(1 + math.log(s) / math.log(self.train_len))

    def at_length(self, length: int) -> LongRoPE:
        longer = length if length > self.train_len else None
        return self if longer == self.length else replace(self, length=longer)
