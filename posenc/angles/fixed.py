"""Sines and cosines of ``position * frequency``, accurate to the last bits at any position.

A float32 product ``pos * frequency`` is off by 0.03 rad at position 10**6, and splitting it into
float32 pieces does not help. Here a frequency is a fixed-point fraction of a *turn*. Whole turns
then vanish from an integer product, because integers wrap around exactly as angles do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

from posenc.contract.operations import constant_array, device
from posenc.contract.protocol import Array, Namespace

_DIGITS = 60  # decimal digits; a 128-bit fraction needs fewer
TURN = Decimal("6.283185307179586476925286766559005768394338798750211641949889184616")  # 2 pi
_BITS = 128


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Within it, arithmetic with ``Decimal`` has 60 digits."""
    with localcontext() as context:
        context.prec = _DIGITS
        yield


def frequencies(base: float, exponents: Iterable[Fraction]) -> tuple[Decimal, ...]:
    """``base ** -e`` for each exponent, in radians per position, to 60 digits."""
    with exact_arithmetic():
        return tuple(
            Decimal(base) ** (Decimal(-int(e.numerator)) / int(e.denominator)) for e in exponents
        )


def cosine(angle: Decimal) -> Decimal:
    """The cosine of an angle of at most a turn, by its Taylor series, to 57 digits."""
    total = term = Decimal(1)
    for n in range(2, 120, 2):
        term *= -angle * angle / (n * (n - 1))
        total += term
    return total


class Turns:
    """Frequencies in turns per position, split for 32-bit and for 64-bit integer arithmetic.

    In units of ``2**-word`` turns a frequency is ``high + low``, with ``high`` an integer and
    ``low`` in [-1/2, 1/2). The phase at ``pos`` is ``pos * high + round(pos * low)``, modulo one
    turn. The first product wraps exactly. The second is at most ``|pos| / 2`` units, so a float
    suffices.

    Parameters
    ----------
    radians
        Frequencies in radians per position; ``Decimal`` or ``float``, taken as exact.
    """

    def __init__(self, radians: Iterable[Decimal | float]) -> None:
        with exact_arithmetic():
            fractions = [int(Decimal(f) / TURN * 2**_BITS) % 2**_BITS for f in radians]
        # Not arrays, because torch.export(strict=True) loses the numbers of a NumPy array.
        self._narrow, self._wide = _split(fractions, 32), _split(fractions, 64)

    def sincos(self, pos: Array, *, dtype: Any, xp: Namespace) -> tuple[Array, Array]:
        """Sine and cosine of every frequency at integer positions ``pos (...)``.

        Returns two arrays ``(..., n)`` of ``dtype``, float32 or float64. For ``|pos| <= 2**30``
        the absolute error is at most 1.5e-7 in float32 and 4e-16 in float64.
        """
        return self.sincos_each(pos[..., None], dtype=dtype, xp=xp)

    def sincos_each(self, pos: Array, *, dtype: Any, xp: Namespace) -> tuple[Array, Array]:
        """As ``sincos``, with a position for each frequency: ``pos (..., n)`` or ``(..., 1)``."""
        wide = dtype == xp.float64
        word, integer, table = (64, xp.int64, self._wide) if wide else (32, xp.int32, self._narrow)
        high = constant_array(table[0], dtype=integer, device=device(pos), xp=xp)
        low = constant_array(table[1], dtype=dtype, device=device(pos), xp=xp)
        carry = xp.astype(xp.round(xp.astype(pos, dtype) * low), integer)
        phase = xp.astype(pos, integer) * high + carry
        return sincos_of_phase(phase, word, dtype=dtype, xp=xp)

    def cosines(self, pos: Array, *, dtype: Any, xp: Namespace) -> Iterator[Array]:
        """Cosine of each frequency in turn, in the shape of ``pos``.

        It makes no array of frequencies, so a kernel can compute it for a single position. For
        ``|pos| <= 2**31`` the absolute error is at most 1.5e-7 in float32 and 4e-16 in float64.
        """
        wide = dtype == xp.float64
        word, integer, table = (64, xp.int64, self._wide) if wide else (32, xp.int32, self._narrow)
        whole, real = xp.astype(pos, integer), xp.astype(pos, dtype)
        for high, low in zip(*table, strict=True):
            # Not operators, because NumPy warns where its scalars wrap around.
            phase = xp.add(xp.multiply(whole, high), xp.astype(xp.round(real * low), integer))
            # The angle to the nearest zero of the cosine, which has the more digits the smaller.
            rest = xp.subtract(2 ** (word - 2), xp.abs(phase))
            yield xp.sin(xp.astype(rest, dtype) * (2 * math.pi / 2**word))


def sincos_of_phase(
    phase: Array, word: int, more: Array | None = None, *, dtype: Any, xp: Namespace
) -> tuple[Array, Array]:
    """Sine and cosine of ``phase``, in units of ``2**-word`` turns, plus ``more`` radians."""
    # The nearest quarter turn, and the remaining angle, at most an eighth of a turn.
    quarter = (phase + 2 ** (word - 3)) >> (word - 2)
    angle = xp.astype(phase - (quarter << (word - 2)), dtype) * (2 * math.pi / 2**word)
    angle = angle if more is None else angle + more
    sin, cos = xp.sin(angle), xp.cos(angle)
    swapped = (quarter & 1) == 1
    sin, cos = xp.where(swapped, cos, sin), xp.where(swapped, sin, cos)
    # 1 or -1; a product takes half the time of choosing between a number and its negative.
    sign_of_sin = xp.astype(1 - (quarter & 2), dtype)
    sign_of_cos = xp.astype(1 - ((quarter + 1) & 2), dtype)
    return sin * sign_of_sin, cos * sign_of_cos


def _split(fractions: list[int], word: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    rest = _BITS - word
    high = [(f + 2 ** (rest - 1)) >> rest for f in fractions]
    low = tuple((f - (h << rest)) / 2**rest for f, h in zip(fractions, high, strict=True))
    return tuple(h - 2**word if h >= 2 ** (word - 1) else h for h in high), low
