"""Random float positions: a scheme at real numbers, which integers count in small units.

Training on ``T`` tokens draws their positions as ``T`` different real numbers, uniform in
``[0, N)``, in order. An evaluation of ``n`` tokens spreads them evenly over the same range: token
``i = 1 .. n`` is at ``N (2i - 1) / (2 max(T, n))``. So no position and no distance is beyond those
of training. Random Float Sampling, Shimizu, Taniguchi and Matsuo 2026, arXiv 2602.14050, where
``N = 1``: the larger ``N``, the more the positions of neighbours differ.

posenc's positions are integers, which alone are exact. So training draws integers and each counts
one of ``units(N)`` parts of a position: a grid as fine as float32's at ``N``. In an evaluation, an
integer counts a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from posenc.angles.fixed import Turns, exact_arithmetic
from posenc.contract.params import float_dtype
from posenc.contract.protocol import Array, Arrays, Namespace, PositionScheme
from posenc.layers import LayerPlan
from posenc.schemes import ALiBi, Kerple, NoPE, RoPE, Scaling, Sinusoidal, Sum, Wrapper

_GRID = 2**24  # positions; float32 has as many numbers below the same power of two, evenly spaced
_ACCEPTED = "RoPE with any scaling, ALiBi, Kerple, Sinusoidal, NoPE, and sums of these"


def units(reach: int) -> int:
    """Units in a position, a power of two, for positions below ``reach``."""
    return max(1, _GRID >> (reach - 1).bit_length())


@dataclass(frozen=True)
class Step:
    """How far apart two integers are: a unit in training, the spacing of tokens at a length."""

    reach: int
    trained: int
    length: int | None = None

    def at_length(self, length: int) -> Step:
        """The step between the tokens of an evaluation."""
        return replace(self, length=length)

    @property
    def size(self) -> Fraction:
        """The step, in positions."""
        if self.length is None:
            return Fraction(1, units(self.reach))
        return Fraction(self.reach, max(self.trained, self.length))

    def times(self, numbers: Iterable[Decimal | float]) -> tuple[Decimal, ...]:
        """Frequencies per step, from frequencies per position."""
        with exact_arithmetic():
            size = Decimal(self.size.numerator) / self.size.denominator
            return tuple(Decimal(number) * size for number in numbers)


def with_float_positions(plan: LayerPlan, reach: int, trained: int, label: str) -> LayerPlan:
    """A plan whose schemes are at float positions below ``reach``, in training on ``trained``.

    Raises
    ------
    ValueError
        A scheme is defined at integers only, as tables and buckets are, or a layer has a window.
    """
    if any(plan.windows):
        raise ValueError(
            f"scheme {label!r}: random_float_positions has no windows of layers, which count "
            "integer positions"
        )
    step = Step(reach, trained)
    return LayerPlan(tuple(_stepped(scheme, step, label) for scheme in plan.schemes))


def _stepped(scheme: PositionScheme, step: Step, label: str) -> PositionScheme:
    if type(scheme) is NoPE:
        return scheme
    if type(scheme) is RoPE:
        return replace(scheme, scaling=Stepped(scheme.scaling or Scaling(), step))
    if type(scheme) in (ALiBi, Kerple):
        return SteppedBias(scheme, step)
    if type(scheme) is Sinusoidal:
        return SteppedSinusoidal(scheme.dim, scheme.base, scheme.layout, step)
    if type(scheme) is Sum:
        return Sum(*(_stepped(part, step, label) for part in scheme.schemes))
    raise ValueError(
        f"scheme {label!r}: random_float_positions cannot be positions of "
        f"{type(scheme).__name__}, accepted: {_ACCEPTED}"
    )


@dataclass(frozen=True)
class Stepped(Scaling):
    """Frequencies per step, after those of a scaling."""

    scaling: Any
    step: Step

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        return self.step.times(self.scaling.scaled(frequencies, base=base, dim=dim))

    @property
    def amplitude(self) -> float:
        return float(self.scaling.amplitude)

    @property
    def score_factor(self) -> float:
        return float(self.scaling.score_factor)

    def at_length(self, length: int) -> Scaling:
        return Stepped(self.scaling.at_length(length), self.step.at_length(length))


@dataclass(frozen=True)
class SteppedBias(Wrapper):
    """A bias of distance that is defined at real numbers."""

    scheme: PositionScheme
    step: Step

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        q, k = (self._real(pos, params, xp) for pos in (q, k))
        return self.scheme.bias(q, k, params=params, xp=xp)

    def key_bias(self, k: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        return self.scheme.key_bias(self._real(k, params, xp), params=params, xp=xp)

    def bias_terms(self) -> tuple[tuple[str, PositionScheme], ...]:
        return (("", self),)

    def at_length(self, length: int) -> PositionScheme:
        return SteppedBias(self.scheme.at_length(length), self.step.at_length(length))

    def _real(self, pos: Array, params: Arrays, xp: Namespace) -> Array:
        return xp.astype(pos, float_dtype(params, xp)) * float(self.step.size)


@dataclass(frozen=True)
class SteppedSinusoidal(Sinusoidal):
    """``Sinusoidal`` at steps; in an evaluation, a token is in the middle of its own."""

    step: Step = Step(1, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        half = (f / 2 for f in self.frequencies())
        object.__setattr__(self, "_turns", Turns(self.step.times(half)))

    def embedding(self, pos: Array, *, params: Arrays, xp: Namespace) -> Array:
        middle = 0 if self.step.length is None else 1
        return super().embedding(2 * pos + middle, params=params, xp=xp)

    def at_length(self, length: int) -> PositionScheme:
        return replace(self, step=self.step.at_length(length))
