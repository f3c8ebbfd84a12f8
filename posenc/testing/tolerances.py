"""How far two right computations may be apart, by dtype, with the reason for each number.

A reason is a bound: how many roundings, of numbers how large, in any order. It holds on every
processor; what one of them rounded to is no reason.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The unit roundoff: one rounding changes a number by at most this part of it."""


def rounding_bound(terms: float, magnitude: float = 1.0, dtype: str = "float32") -> float:
    """How far ``terms`` roundings, each of a number up to ``magnitude``, may move a result.

    Each moves it by at most ``u * magnitude``, so all by at most ``terms * u * magnitude``. That
    bounds a sum in any order, so on any instruction set, if ``magnitude`` is the sum of its
    absolute values [1]_. Many roundings have both signs, and stay below ``4 * sqrt(terms)`` of
    them [2]_. By Hoeffding's inequality that fails with probability ``2 * exp(-8)`` if each is as
    large as it can be; where they are spread evenly it is seven standard deviations.

    References
    ----------
    .. [1] Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2.
    .. [2] Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM Journal
       on Scientific Computing 41 (5), 2019.
    """
    return min(terms, 4 * math.sqrt(terms)) * UNIT[dtype] * magnitude


def attention_bound(dtype: str, *, channels: int = 8, keys: int = 20, score: float = 8.0) -> float:
    """How far attention may be from its true value, relative to the largest number of the result.

    An error ``e`` of a score moves the result by ``w * (v - result) * e``, whose first factors
    are at most half of the largest value, since ``w * |v - result| <= 2 * w * (1 - w) * |v|``.
    A score has a rounding for each product, each sum and each turned channel. Half precision
    instead rounds queries and keys before and after they are turned, and the score, and sums in
    float32. Weights and values are then summed over the keys; half precision rounds weights,
    values and the result once more.
    """
    if dtype in ("float16", "bfloat16"):
        return rounding_bound(5, score / 2, dtype) + rounding_bound(3, 1, dtype)
    return rounding_bound(3 * channels, score / 2, dtype) + rounding_bound(2 * keys, 1, dtype)


ATTENTION_TOL = {dtype: attention_bound(dtype) for dtype in UNIT}
"""Attention on one implementation beside the definition, relative to the largest number, or to 1.

For 8 channels, 20 keys and scores up to 8, as the laws and the tests have them: 104 roundings of
float64 and float32, 6e-6, and 23 of half precision. Where a bias is larger, one rounding of it
counts for many of these. ``tests/core/test_tolerances.py`` adds up the effects of all roundings in
each of these calls.
"""

VALUE_TOL = {dtype: 2 * rounding_bound(64, 1, dtype) for dtype in ("float64", "float32")}
"""A bias, a transform, an embedding or features in two libraries, relative likewise.

Sums of features have most roundings: 6 gates, each of 6 products and a logarithm, about 10, are
added. Twice, because either library rounds.
"""

REDUCTION_FACTOR = 6
"""How many times more for gradients of params and hidden states: they are in every one of a head's
800 scores, so 800 terms of both signs are summed instead of 20, and errors grow like the root."""

SCALAR_VS_ARRAY_TOL = 4 * UNIT["float32"]
"""NumPy computes a power of two numbers otherwise than one of arrays: each is within one unit of
the last place, two roundings, of the true one."""

FLOAT32_TOL = rounding_bound(16)
"""A float32 answer beside the float64 one, of each number: 16 roundings of it, or of 1."""

DERIVATIVE_TOL = 2 * ATTENTION_TOL["float32"]
"""A float32 derivative beside a central difference in float64, relative to the lengths of gradient
and direction: a result goes forward and back. The square of the step times a third derivative, and
a float64 loss divided by the step, are 1e-10 each."""

KEY_BIAS_TOL = 2.0**-30
"""What a bias less its key bias may vary by, relative to the larger of the two, or to 1: float64
sums whose terms are up to 2**20 times as large as their differences, 8 roundings of 53 bits less
20."""


def assert_near(found: Any, expected: Any, tolerance: float, what: str = "values") -> None:
    """Largest difference at most ``tolerance`` times the largest expected number, or 1.

    Infinities must be equal, and what is not finite there must not be NaN here.
    """
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: shape {found.shape}, not {expected.shape}")
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        raise AssertionError(f"{what}: not infinite or NaN where the other is")
    if not np.all(np.isfinite(found[finite])):
        raise AssertionError(f"{what}: {np.sum(~np.isfinite(found[finite]))} are not finite")
    scale = max(1.0, np.max(np.abs(expected[finite]), initial=0))
    apart = np.abs(np.subtract(found, expected, where=finite, out=np.zeros_like(found)))
    error = np.max(apart, initial=0) / scale
    if not error <= tolerance:
        at = tuple(int(i) for i in np.unravel_index(np.argmax(apart), apart.shape))
        raise AssertionError(
            f"{what}: {found[at]:.9g} at {at}, not {expected[at]:.9g}; "
            f"off by {error:.2e}, tolerance {tolerance:.0e}"
        )
