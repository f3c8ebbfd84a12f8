"""ALiBi: attention with linear biases.

``bias = -m_h * |i - j|`` with one fixed slope ``m_h`` per head, added to the scaled scores.

Press, Smith and Lewis 2022, "Train Short, Test Long", arXiv 2108.12409, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np

from posenc.angles import frequencies
from posenc.checks import check_choice, check_count
from posenc.protocol import Array, Namespace, ParamSpec, PositionScheme


@dataclass(frozen=True)
class ALiBi(PositionScheme):
    """A penalty linear in distance: ``bias = -m_h * |i - j|``.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    slopes
        ``"paper"``: ``m_h = 2**(-8h/P)`` for ``h = 1..P``, ``P`` the largest power of two up to
        ``H``, then every second slope of ``2P``. ``"geometric"``: ``m_h = 2**(-8h/H)`` for any
        ``H``. Or ``H`` finite numbers, one slope per head.
    noncausal
        Bias of keys after the query. ``"symmetric"``: the same as before the query.
    learned
        Whether the slopes are a learned array ``slopes (H,)`` that starts from these values.
        The paper found fixed slopes better.

    Press, Smith and Lewis 2022, arXiv 2108.12409.
    """

    relative: ClassVar[bool] = True
    paper: ClassVar[str] = "Press, Smith, Lewis 2022, arXiv 2108.12409"

    num_heads: int
    slopes: str | Sequence[float] = "paper"
    noncausal: Literal["symmetric"] = "symmetric"
    learned: bool = False
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("num_heads", self.num_heads)
        check_choice("noncausal", self.noncausal, ("symmetric",))
        if isinstance(self.slopes, str):
            check_choice("slopes", self.slopes, (*_RULES, "or one number per head"))
            slopes = _RULES[self.slopes](self.num_heads)
        else:
            slopes = _check_slopes(self.slopes, self.num_heads)
            object.__setattr__(self, "slopes", slopes)
        object.__setattr__(self, "_slopes", slopes)

    def head_slopes(self) -> tuple[float, ...]:
        """The slope of each head."""
        return self._slopes

    def param_specs(self) -> Mapping[str, ParamSpec]:
        if not self.learned:
            return {}
        slopes = self.head_slopes()
        return {"slopes": ParamSpec((self.num_heads,), init=lambda rng, shape: np.asarray(slopes))}

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return {} if self.learned else {"slopes": self.head_slopes()}

    def bias(self, q: Array, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        m = params["slopes"]
        return -m * xp.astype(xp.abs(q - k), m.dtype)

    def key_bias(self, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        m = params["slopes"]
        return m * xp.astype(k, m.dtype)


def _geometric(num_heads: int) -> tuple[float, ...]:
    exponents = (Fraction(8 * h, num_heads) for h in range(1, num_heads + 1))
    return tuple(float(m) for m in frequencies(2.0, exponents))


def _paper(num_heads: int) -> tuple[float, ...]:
    power = 2 ** (int(num_heads).bit_length() - 1)
    return _geometric(power) + _geometric(2 * power)[::2][: num_heads - power]


_RULES = {"paper": _paper, "geometric": _geometric}


def _check_slopes(slopes: Sequence[float], num_heads: int) -> tuple[float, ...]:
    try:
        values = tuple(float(m) for m in slopes)
    except (TypeError, ValueError):
        raise TypeError(f"slopes must be one number per head, got {slopes!r}") from None
    if len(values) != num_heads:
        raise ValueError(
            f"slopes has {len(values)} values for num_heads={num_heads}; give one each"
        )
    if not all(map(math.isfinite, values)):
        raise ValueError(f"slopes must be finite numbers, got {values}")
    return values
