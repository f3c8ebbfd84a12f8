"""Tolerances: how much two correct computations may differ, by dtype, each with its reason.

Each reason is a bound: the number of roundings and the size of the rounded numbers, in any order.
It holds on every processor, unlike an error measured on one of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from posenc.testing.places import Where, first_index

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The unit roundoff: one rounding changes a number by at most this fraction of it."""


def rounding_bound(terms: float, magnitude: float = 1.0, dtype: str = "float32") -> float:
    """Bound on the error from ``terms`` roundings of numbers up to ``magnitude``.

    Each rounding adds at most ``u * magnitude``, so all add at most ``terms * u * magnitude``. This
    bounds a sum in any order, hence on any instruction set, if ``magnitude`` is the sum of its
    absolute values [1]_. Many roundings have both signs and stay below ``4 * sqrt(terms)`` of
    them [2]_. By Hoeffding's inequality this fails with probability ``2 * exp(-8)`` if every
    rounding is as large as possible. For evenly spread roundings it is seven standard deviations.

    References
    ----------
    .. [1] Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2.
    .. [2] Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM Journal
       on Scientific Computing 41 (5), 2019.
    """
    return min(terms, 4 * math.sqrt(terms)) * UNIT[dtype] * magnitude


def attention_bound(dtype: str, *, channels: int = 8, keys: int = 20, score: float = 8.0) -> float:
    """Bound on the error of attention, relative to the largest number of the result.

    An error ``e`` of a score moves the result by ``w * (v - result) * e``, whose first factors
    are at most half of the largest value, since ``w * |v - result| <= 2 * w * (1 - w) * |v|``.
    A score has a rounding for each product, each sum and each rotated channel. Half precision
    instead rounds queries and keys before and after rotation, and the score; its sums are float32.
    Weights and values are then summed over the keys; half precision also rounds weights, values
    and the result.
    """
    if dtype in ("float16", "bfloat16"):
        return rounding_bound(5, score / 2, dtype) + rounding_bound(3, 1, dtype)
    return rounding_bound(3 * channels, score / 2, dtype) + rounding_bound(2 * keys, 1, dtype)


ATTENTION_TOL = {dtype: attention_bound(dtype) for dtype in UNIT}
"""Attention of an implementation against the reference, relative to the largest number or 1.

The laws and tests have 8 channels, 20 keys and scores up to 8. That makes 104 roundings of float64
and of float32 (6e-6), and 23 of half precision. One rounding of a larger bias counts for many of
these.
``tests/core/test_tolerances.py`` adds up the effects of all roundings in each of these calls.
"""

VALUE_TOL = {dtype: 2 * rounding_bound(64, 1, dtype) for dtype in ("float64", "float32")}
"""A bias, a transform, an embedding or features in two libraries, relative to the same.

Cumulative features have the most roundings: 6 gates are added, each with about 10 roundings from 6
products and a logarithm. The factor 2 is because both libraries round.
"""

REDUCTION_FACTOR = 6
"""Factor for gradients of params and hidden states. They affect all 800 scores of a head, so 800
terms of both signs are summed instead of 20. Errors grow like the square root of their number."""

SCALAR_VS_ARRAY_TOL = 4 * UNIT["float32"]
"""A scalar evaluation against one on arrays: NumPy computes powers differently for both. Each is
within one unit in the last place, two roundings, of the true value."""

FLOAT32_TOL = rounding_bound(16)
"""A float32 result against the float64 one, per number: 16 roundings of it, or of 1."""

DERIVATIVE_TOL = 2 * ATTENTION_TOL["float32"]
"""A float32 derivative against a central difference in float64, relative to the norms of gradient
and direction. The factor 2: forward and backward pass. The errors of the difference, a third
derivative times the step squared and the rounding of the loss over the step, are 1e-10 each."""

KEY_BIAS_TOL = 2.0**-30
"""How much ``bias - key_bias`` may vary over keys, relative to the larger of the two or 1. It is 8
roundings in float64 of terms up to 2**20 times as large as their difference."""


def assert_near(
    actual: Any,
    expected: Any,
    tolerance: float,
    what: str = "values",
    *,
    where: Where = str,
    more: Any = 0.0,
) -> None:
    """Raise unless each difference is at most ``tolerance * max(1, largest expected)``.

    Infinities and NaNs must be at the same places. The message has the first wrong number, whose
    index ``where`` names. ``more`` is allowed on top, one number or one for each.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {actual.shape}, not {expected.shape}")
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        raise AssertionError(f"{what}: not infinite or NaN where the other is")
    if not np.all(np.isfinite(actual[finite])):
        raise AssertionError(f"{what}: {np.sum(~np.isfinite(actual[finite]))} are not finite")
    scale = max(1.0, np.max(np.abs(expected[finite]), initial=0))
    difference = np.abs(np.subtract(actual, expected, where=finite, out=np.zeros_like(actual)))
    wrong = ~(difference <= tolerance * scale + more)
    if np.any(wrong):
        at, error = first_index(wrong), np.max(difference) / scale
        raise AssertionError(
            f"{what}: {actual[at]:.9g}, expected {expected[at]:.9g} at {where(at)}; "
            f"{np.sum(wrong)} of {wrong.size} off, by up to {error:.2e}, tolerance {tolerance:.0e}"
        )
