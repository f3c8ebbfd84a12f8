"""Sines and cosines of ``position * frequency`` for frequencies that are learned.

``posenc.angles`` prepares its fixed frequencies in Python. Here the same fixed-point fractions of a
turn are computed from floats within the program, and gradients pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from posenc.angles.fixed import TURN, exact_arithmetic, sincos_of_phase
from posenc.contract.protocol import Array, Namespace

# A frequency is cut into its whole part and 5 digits, of 12 bits in float32 and 24 in float64. A
# turn is cut into 5 limbs, of 16 and 32 bits: two for the word of a phase, and more beyond it.
_DIGITS = _LIMBS = 5


def _limbs_of_digits(word: int) -> tuple[tuple[int, ...], ...]:
    """One unit of each digit, in turns, as limbs with the lowest first."""
    digit, limb = 3 * word // 8, word // 2
    with exact_arithmetic():
        units = [
            2 ** (limb * _LIMBS) / (Decimal(2) ** (digit * n) * TURN) for n in range(_DIGITS + 1)
        ]
    mask = 2**limb - 1
    return tuple(tuple(int(u) >> (limb * k) & mask for k in range(_LIMBS)) for u in units)


_NARROW, _WIDE = _limbs_of_digits(32), _limbs_of_digits(64)


def sincos_of_sum(
    terms: Iterable[tuple[Array, Array]], *, dtype: Any, xp: Namespace
) -> tuple[Array, Array]:
    """Sine and cosine of the sum of ``pos * frequency`` over ``terms``, which broadcast.

    Positions are integers, frequencies radians per position of ``dtype``, float32 or float64, and
    taken as exact. For ``|frequency| < 2**11`` the absolute error is at most 1.5e-7 in float32 for
    ``|pos| <= 2**24``, and up to ``2**30`` at most 1.4e-7 more per term. In float64 it is at most
    4e-16 up to ``2**30``.
    """
    wide = dtype == xp.float64
    word, integer = (64, xp.int64) if wide else (32, xp.int32)
    phase: Array = 0
    more: Array = 0.0
    for pos, frequency in terms:
        high, low, rest = _turns(frequency, word, integer, xp)
        whole, real = xp.astype(pos, integer), xp.astype(pos, dtype)
        phase = phase + whole * high + xp.astype(xp.round(real * low), integer)
        # It is nearly 0, and has the derivative of the whole: digits are integers and have none.
        more = more + real * rest
    return sincos_of_phase(phase, word, more, dtype=dtype, xp=xp)


def _turns(frequency: Array, word: int, integer: Any, xp: Namespace) -> tuple[Array, Array, Array]:
    """A frequency in units of ``2**-word`` turns, ``high + low``, and the radians that are left."""
    digit_bits, limb_bits = 3 * word // 8, word // 2
    limbs: list[Array] = [0] * _LIMBS
    rest = frequency
    for n, row in enumerate(_WIDE if word == 64 else _NARROW):
        rest = rest * 2.0**digit_bits if n else rest
        digit = xp.trunc(rest)
        rest = rest - digit  # exact, as it would not be with floor
        limbs = [
            limb + xp.astype(digit, integer) * part for limb, part in zip(limbs, row, strict=True)
        ]
    for n in range(_LIMBS - 1):
        limbs[n + 1] = limbs[n + 1] + (limbs[n] >> limb_bits)
    limbs = [limb & (2**limb_bits - 1) for limb in limbs]
    high = (limbs[-1] << limb_bits) | limbs[-2]
    third, fourth = (xp.astype(limb, frequency.dtype) for limb in (limbs[-3], limbs[-4]))
    low = (third + fourth / 2.0**limb_bits) / 2.0**limb_bits
    return high, low, rest * 2.0 ** -(digit_bits * _DIGITS)
