"""How far transformers' float32 frequencies may be from exact ones."""

from __future__ import annotations

import math

from posenc.testing.tolerances import UNIT


def relative_error(base):
    """How far float32 may be from ``base**-e``, ``0 <= e < 1``, in parts of it.

    The exponent, rounded once, moves it by ``ln(base)`` roundings; the base, by one. The power is
    within two units of the last place, which are four roundings; the reciprocal is one more, and so
    are a product or quotient with a factor and the factor's own rounding.
    """
    return (math.log(base) + 8) * UNIT["float32"]
