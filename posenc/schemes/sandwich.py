"""Sandwich: what is left of sinusoidal embeddings in the scores, the product of two positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from posenc.angles.fixed import Turns, frequencies
from posenc.contract.fields import Count, Positive
from posenc.contract.protocol import Array, Arrays, Namespace, PositionScheme


@dataclass(frozen=True)
class Sandwich(PositionScheme, relative=True, paper="Chi et al. 2023, arXiv 2212.10356"):
    """``bias = H / (8 h) * sum_k cos((i - j) / base**(2k / dim))``, ``k = 0 .. dim/2 - 1``.

    ``sin(i f) sin(j f) + cos(i f) cos(j f) = cos((i - j) f)``, summed over frequencies ``f``. It
    falls about as the logarithm of distance, and nothing is learned.

    Heads count from ``h = 1``, and ``8 h / H`` is the paper's compression ratio. The bias of a
    query's own key is the highest, ``H dim / (16 h)``; float32 is exact to about 1e-7 of that.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    dim
        Width of the sinusoidal embeddings whose product it is, even. It is a hyperparameter, not
        the width of the model; ``posenc.make("sandwich")`` takes the paper's 128.
    base
        Base of the frequencies.

    Section 5 and appendix E.
    """

    num_heads: Count
    dim: Count = 128
    base: Positive = 10000.0
    _turns: Turns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ValueError(f"dim must be even, got {self.dim}: sines and cosines come in pairs")
        n = self.dim // 2
        turns = Turns(frequencies(self.base, (Fraction(2 * k, self.dim) for k in range(n))))
        object.__setattr__(self, "_turns", turns)

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        heads = self.num_heads
        return {"strength": tuple(heads / (8 * h) for h in range(1, heads + 1))}

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array:
        strength = params["strength"]
        return strength * _sum(list(self._turns.cosines(q - k, dtype=strength.dtype, xp=xp)))


def _sum(terms: list[Array]) -> Array:
    """The sum in pairs: far from its own size, float32 would lose digits in one term at a time."""
    while len(terms) > 1:
        last = terms[-1:] if len(terms) % 2 else []
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)] + last
    return terms[0]
