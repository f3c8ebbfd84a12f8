"""What a scaling of RoPE's frequencies may change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

from posenc.angles.fixed import exact_arithmetic, frequencies
from posenc.contract.declared import Declared


@dataclass(frozen=True)
class Scaling(Declared):
    """Base class of RoPE's scalings, and the scaling that changes nothing.

    A scaling is a frozen dataclass. It overrides ``scaled``, and perhaps ``amplitude``,
    ``score_factor`` and ``at_length``.
    """

    # Facts, given as class keywords: ``class PI(Scaling, paper="Chen et al. 2023")``.

    paper: ClassVar[str] = "Su et al. 2021, arXiv 2104.09864"
    """Authors, year and arXiv number."""

    trained: ClassVar[bool] = False
    """Whether models are trained with it. Otherwise it extends a model trained with plain RoPE."""

    _FACTS: ClassVar[Mapping[str, type]] = {"paper": str, "trained": bool}

    @classmethod
    def fitted(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return default options for the given sizes and options of ``posenc.make``.

        ``factor`` is ``max_len / train_len``, at least 1, if models are not trained with it.
        """
        has_factor = "factor" in {field.name for field in fields(cls)}
        if cls.trained or not has_factor or not {"max_len", "train_len"} <= given.keys():
            return {}
        return {"factor": max(1.0, given["max_len"] / given["train_len"])}

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal | float]:
        """Return the frequencies to use instead of ``base**(-2k/dim)``, ``k = 0 .. dim/2 - 1``.

        They are in radians per position, as ``Decimal`` or ``float``. Arithmetic with ``Decimal``
        has 60 digits here.
        """
        return frequencies

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines; scores of rotated channels get its square."""
        return 1.0

    @property
    def score_factor(self) -> float:
        """The factor of the softmax scale, so of all scores."""
        return 1.0

    def at_length(self, length: int) -> Scaling:
        """Return the scaling for a context of ``length`` tokens."""
        return self

    def frequencies(self, base: float, dim: int) -> tuple[Decimal, ...]:
        """The ``dim / 2`` scaled frequencies of RoPE, in radians per position, to 60 digits."""
        plain = frequencies(base, (Fraction(2 * k, dim) for k in range(dim // 2)))
        with exact_arithmetic():
            scaled = tuple(Decimal(f) for f in self.scaled(plain, base=Decimal(base), dim=dim))
        if len(scaled) != len(plain):
            name = type(self).__name__
            raise ValueError(f"{name}.scaled must return {len(plain)} numbers, got {len(scaled)}")
        return scaled
