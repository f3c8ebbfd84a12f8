"""ALiBi: attention with linear biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from posenc.angles.fixed import frequencies
from posenc.contract.checks import check_choice, check_per_head
from posenc.contract.fields import Count, Positive
from posenc.contract.protocol import Array, Arrays, Namespace
from posenc.schemes.alibi_encoder import EncoderALiBi, Noncausal
from posenc.schemes.alibi_interpolated import InterpolatedALiBi


@dataclass(frozen=True)
class ALiBi(InterpolatedALiBi, EncoderALiBi, paper="Press, Smith, Lewis 2022, arXiv 2108.12409"):
    """A penalty linear in distance: ``bias = -m_h * |i - j|``, with a slope ``m_h`` per head.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    slopes
        ``"paper"``: ``m_h = 2**(-8h/P)`` for ``h = 1..P``, ``P`` the largest power of two up to
        ``H``, then every second slope of ``2P``. ``"geometric"``: ``m_h = 2**(-8h/H)`` for any
        ``H``. Or ``H`` finite numbers, one slope per head.
    noncausal, later_slopes
        Bias of keys after the query: ``posenc.schemes.alibi_encoder``. Default: as before it.
    learned
        Whether the slopes are a learned array ``slopes (H,)`` that starts from these values, and
        given ``later_slopes`` likewise. The paper found fixed slopes better.
    max_bias
        The 8 in the rules for slopes; ``alibi_bias_max`` of MPT.
    interpolate_from, length
        Smaller slopes in longer contexts: ``posenc.schemes.alibi_interpolated``.

    Section 3. The paper is about causal models.
    """

    num_heads: Count
    slopes: str | Sequence[float] = "paper"
    noncausal: Noncausal = "symmetric"
    learned: bool = False
    later_slopes: Sequence[float] | None = None
    max_bias: Positive = 8.0
    interpolate_from: Count | None = None
    length: Count | None = None
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array:
        m = self.interpolate(params["slopes"])
        before = -m * xp.astype(xp.abs(q - k), m.dtype)
        return self.with_later_keys(before, m, q, k, params=params, xp=xp)

    def key_bias(self, k: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        if self.noncausal == "asymmetric":
            return None
        m = self.interpolate(params["slopes"])
        return m * xp.astype(k, m.dtype)

    def __post_init__(self) -> None:
        self.check_forms()
        self.check_length()
        if isinstance(self.slopes, str):
            check_choice("slopes", self.slopes, (*_RULES, "or one number per head"))
            halves = 2 if self.noncausal == "asymmetric" else 1
            slopes = halves * _RULES[self.slopes](self.num_heads // halves, self.max_bias)
        else:
            slopes = check_per_head("slopes", self.slopes, self.num_heads)
            object.__setattr__(self, "slopes", slopes)
            if self.max_bias != 8:
                raise ValueError(f"max_bias={self.max_bias} needs a rule for slopes, got {slopes}")
        object.__setattr__(self, "_slopes", slopes)

    def head_slopes(self) -> tuple[float, ...]:
        """The slope of each head, before interpolation."""
        return self._slopes


def _geometric(num_heads: int, max_bias: float) -> tuple[float, ...]:
    exponents = (Fraction(max_bias) * h / num_heads for h in range(1, num_heads + 1))
    return tuple(float(m) for m in frequencies(2.0, exponents))


def _paper(num_heads: int, max_bias: float) -> tuple[float, ...]:
    power = 2 ** (int(num_heads).bit_length() - 1)
    more = _geometric(2 * power, max_bias)[::2][: num_heads - power]
    return _geometric(power, max_bias) + more


_RULES = {"paper": _paper, "geometric": _geometric}
