"""ALiBi: attention with linear biases.

``bias = -m_h * |i - j|`` with one fixed slope ``m_h`` per head, added to the scaled scores.

Press, Smith and Lewis 2022, "Train Short, Test Long", arXiv 2108.12409, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np

from posenc.angles import frequencies
from posenc.checks import check_choice, check_count, check_flag, check_positive
from posenc.protocol import Array, Initializer, Namespace, ParamSpec, PositionScheme


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
        Bias of keys after the query; without a causal mask it matters.

        - ``"symmetric"``: the same as before the query.
        - ``"asymmetric"``: the first ``H/2`` heads see keys up to the query, the others keys from
          the query on. A rule gives each half the slopes of ``H/2`` heads. ``H`` is even.
        - ``"two_sided"``: slopes of their own, ``later_slopes``.
        - ``"offset"``: ``-m_h * |i - j| + m_h / 2``, so that the keys at distance ``n`` on both
          sides differ.
    learned
        Whether the slopes are a learned array ``slopes (H,)`` that starts from these values, and
        given ``later_slopes`` likewise. The paper found fixed slopes better.
    later_slopes
        ``H`` finite numbers, for ``"two_sided"``. Default: a learned array ``later_slopes (H,)``
        that starts from the other slopes.
    max_bias
        The 8 in the rules for slopes; ``alibi_bias_max`` of MPT.
    interpolate_from
        A length ``L0``, such as the training length. Then ``at_length(L)`` multiplies slopes by
        ``min(1, L0 / L)``. Default: slopes are the same at every length.
    length
        The length ``L`` of the context, which ``at_length`` sets.

    Press, Smith and Lewis 2022, arXiv 2108.12409. The paper is about causal models; ``asymmetric``,
    ``two_sided`` and ``offset`` are in wide use for encoders, and in none of its equations.
    """

    relative: ClassVar[bool] = True
    paper: ClassVar[str] = "Press, Smith, Lewis 2022, arXiv 2108.12409"

    num_heads: int
    slopes: str | Sequence[float] = "paper"
    noncausal: Literal["symmetric", "asymmetric", "two_sided", "offset"] = "symmetric"
    learned: bool = False
    later_slopes: Sequence[float] | None = None
    max_bias: float = 8.0
    interpolate_from: int | None = None
    length: int | None = None
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _own_hooks: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("num_heads", self.num_heads)
        check_choice("noncausal", self.noncausal, _NONCAUSAL)
        check_flag("learned", self.learned)
        check_positive("max_bias", self.max_bias)
        if self.noncausal == "asymmetric" and self.num_heads % 2:
            raise ValueError(
                f"noncausal='asymmetric' needs an even num_heads, got {self.num_heads}: "
                "half of the heads see earlier keys, half see later ones"
            )
        if isinstance(self.slopes, str):
            check_choice("slopes", self.slopes, (*_RULES, "or one number per head"))
            slopes = self._slopes_by_rule(_RULES[self.slopes])
        else:
            slopes = _check_slopes("slopes", self.slopes, self.num_heads)
            object.__setattr__(self, "slopes", slopes)
            if self.max_bias != 8:
                raise ValueError(f"max_bias={self.max_bias} needs a rule for slopes, got {slopes}")
        object.__setattr__(self, "_slopes", slopes)
        if self.later_slopes is not None:
            if self.noncausal != "two_sided":
                raise ValueError(
                    f"later_slopes needs noncausal='two_sided', got {self.noncausal!r}"
                )
            later = _check_slopes("later_slopes", self.later_slopes, self.num_heads)
            object.__setattr__(self, "later_slopes", later)
        for name in ("interpolate_from", "length"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.length is not None and self.interpolate_from is None:
            raise ValueError(f"length={self.length} needs interpolate_from, the length of slopes")
        absent = {"key_bias": self.noncausal == "asymmetric"}
        absent["at_length"] = self.interpolate_from is None
        own = super().hooks() - {hook for hook, is_absent in absent.items() if is_absent}
        object.__setattr__(self, "_own_hooks", own)

    def _slopes_by_rule(self, rule: Callable[[int, float], tuple[float, ...]]) -> tuple[float, ...]:
        if self.noncausal == "asymmetric":
            return 2 * rule(self.num_heads // 2, self.max_bias)
        return rule(self.num_heads, self.max_bias)

    def head_slopes(self) -> tuple[float, ...]:
        """The slope of each head, before interpolation."""
        return self._slopes

    def hooks(self) -> frozenset[str]:
        return self._own_hooks

    def _arrays(self) -> dict[str, tuple[tuple[float, ...], bool]]:
        """The numbers per head that the bias reads, by name, and whether each is learned."""
        arrays = {"slopes": (self._slopes, self.learned)}
        half = self.num_heads // 2
        if self.noncausal == "asymmetric":
            arrays["side"] = ((1.0,) * half + (-1.0,) * half, False)
        if self.noncausal == "two_sided":
            given = self.later_slopes
            later = self._slopes if given is None else tuple(given)
            arrays["later_slopes"] = (later, self.learned or given is None)
        return arrays

    def param_specs(self) -> Mapping[str, ParamSpec]:
        learned = {name: values for name, (values, learns) in self._arrays().items() if learns}
        return {name: ParamSpec((self.num_heads,), _start(v)) for name, v in learned.items()}

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return {name: values for name, (values, learns) in self._arrays().items() if not learns}

    def at_length(self, length: int) -> ALiBi:
        return self if self.interpolate_from is None else replace(self, length=length)

    def caution(self, *, causal: bool) -> str | None:
        if causal and self.noncausal == "asymmetric":
            return "causal=True masks later keys, so half of the heads see only the query's own key"
        if causal and self.noncausal == "two_sided":
            return "causal=True masks later keys, so later_slopes are never read"
        return None

    def _read_slopes(self, params: Mapping[str, Array], name: str = "slopes") -> Array:
        """The slopes at the length of the context."""
        if self.interpolate_from is None or self.length is None:
            return params[name]
        return min(1.0, self.interpolate_from / self.length) * params[name]

    def bias(self, q: Array, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        m = self._read_slopes(params)
        before = -m * xp.astype(xp.abs(q - k), m.dtype)
        if self.noncausal == "asymmetric":
            return xp.where(params["side"] * xp.astype(q - k, m.dtype) >= 0, before, -xp.inf)
        if self.noncausal == "offset":
            return xp.where(k > q, before + m / 2, before)
        if self.noncausal == "two_sided":
            later = self._read_slopes(params, "later_slopes")
            return xp.where(k > q, later * xp.astype(q - k, m.dtype), before)
        return before

    def key_bias(self, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        if self.noncausal == "asymmetric":
            return None
        m = self._read_slopes(params)
        return m * xp.astype(k, m.dtype)


_NONCAUSAL = ("symmetric", "asymmetric", "two_sided", "offset")


def _start(values: tuple[float, ...]) -> Initializer:
    return lambda rng, shape: np.asarray(values)


def _geometric(num_heads: int, max_bias: float) -> tuple[float, ...]:
    exponents = (Fraction(max_bias) * h / num_heads for h in range(1, num_heads + 1))
    return tuple(float(m) for m in frequencies(2.0, exponents))


def _paper(num_heads: int, max_bias: float) -> tuple[float, ...]:
    power = 2 ** (int(num_heads).bit_length() - 1)
    more = _geometric(2 * power, max_bias)[::2][: num_heads - power]
    return _geometric(power, max_bias) + more


_RULES = {"paper": _paper, "geometric": _geometric}


def _check_slopes(name: str, slopes: Sequence[float], num_heads: int) -> tuple[float, ...]:
    try:
        values = tuple(float(m) for m in slopes)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be one number per head, got {slopes!r}") from None
    if len(values) != num_heads:
        raise ValueError(
            f"{name} has {len(values)} values for num_heads={num_heads}; give one each"
        )
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name} must be finite numbers, got {values}")
    return values
