"""Sines and cosines of ``position * frequency`` for frequencies that are learned.

``posenc.angles`` prepares its fixed frequencies in Python. Here the same fixed-point fractions of a
turn are computed from float32 numbers within the program, and gradients pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from posenc.angles import TURN, exact_arithmetic, sincos_of_phase
from posenc.protocol import Array, Namespace

_DIGIT, _DIGITS = 12, 5  # bits of a digit of a frequency; digits after its point
_LIMB, _LIMBS = 16, 5  # bits of a limb of a fraction of a turn; limbs


def _limbs_of_digits() -> tuple[tuple[int, ...], ...]:
    """``2**-(12 n)`` radians in turns, ``n = 0 .. 5``, as limbs with the lowest first."""
    with exact_arithmetic():
        bits = _LIMB * _LIMBS
        turns = [int(Decimal(2) ** (bits - _DIGIT * n) / TURN) for n in range(_DIGITS + 1)]
    mask = 2**_LIMB - 1
    return tuple(tuple(t >> (_LIMB * k) & mask for k in range(_LIMBS)) for t in turns)


_TABLE = _limbs_of_digits()


def sincos_of_sum(
    terms: Iterable[tuple[Array, Array]], *, dtype: Any, xp: Namespace
) -> tuple[Array, Array]:
    """Sine and cosine of the sum of ``pos * frequency`` over ``terms``, which broadcast.

    Positions are integers, frequencies radians per position of ``dtype``. In float32, for
    ``|frequency| < 2**11``, the absolute error is at most 1.5e-7 for ``|pos| <= 2**24``, and up to
    ``2**30`` at most 1.4e-7 more per term. In float64, products are products of floats: they are
    off by ``2**-53`` of their sizes.
    """
    if dtype == xp.float64:
        angle = sum(xp.astype(pos, dtype) * frequency for pos, frequency in terms)
        return xp.sin(angle), xp.cos(angle)
    phase: Array = 0
    more: Array = 0.0
    for pos, frequency in terms:
        high, low, rest = _turns(frequency, xp)
        whole, real = xp.astype(pos, xp.int32), xp.astype(pos, dtype)
        phase = phase + whole * high + xp.astype(xp.round(real * low), xp.int32)
        # It is nearly 0, and has the derivative of the whole: digits are integers and have none.
        more = more + real * rest
    return sincos_of_phase(phase, 32, more, dtype=dtype, xp=xp)


def _turns(frequency: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """A frequency in units of ``2**-32`` turns, ``high + low``, and the radians that are left."""
    limbs: list[Array] = [0] * _LIMBS
    rest = frequency
    for n, row in enumerate(_TABLE):
        rest = rest * 2.0**_DIGIT if n else rest
        digit = xp.trunc(rest)
        rest = rest - digit  # exact, as it would not be with floor
        limbs = [
            limb + xp.astype(digit, xp.int32) * part for limb, part in zip(limbs, row, strict=True)
        ]
    for n in range(_LIMBS - 1):
        limbs[n + 1] = limbs[n + 1] + (limbs[n] >> _LIMB)
    limbs = [limb & (2**_LIMB - 1) for limb in limbs]
    high = (limbs[-1] << _LIMB) | limbs[-2]
    low = xp.astype(limbs[-3], frequency.dtype) + xp.astype(limbs[-4], frequency.dtype) / 2**_LIMB
    return high, low / 2**_LIMB, rest * 2.0 ** -(_DIGIT * _DIGITS)
