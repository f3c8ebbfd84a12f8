"""How far two right computations may be apart, by dtype, with the reason for each number."""

from __future__ import annotations

from typing import Any

import numpy as np

PATHS = {
    # Sums of 8 channels and 20 keys, in another order: some tens of roundings of 1e-16.
    "float64": 1e-14,
    # Likewise of 6e-8; rotations and exponentials add 1e-7 each.
    "float32": 3e-6,
    # Scores near 5, rotated queries and keys, and weights are all rounded to 11 bits, 5e-4.
    "float16": 5e-3,
    # The same to 8 bits, 4e-3.
    "bfloat16": 4e-2,
}
"""Attention on one path beside the same on another, relative to the largest number, or to 1."""

VALUES = {
    # The same operations in the same order: only sines, exponentials and sums round otherwise.
    "float64": 1e-14,
    "float32": 2e-6,
}
"""A bias, a transform, an embedding or coordinates in two libraries, relative likewise."""

SUMMED = 6
"""How many times more for gradients of params and hidden states: they are in every one of a head's
800 scores, so 800 terms of both signs are summed instead of 20."""

SCALARS = 2.0**-22
"""NumPy computes a power of two numbers otherwise than one of arrays: some units of float32."""

ROUNDED = 2.0**-20
"""A float32 answer beside the float64 one, of each number: 16 roundings of it, or of 1."""

DIFFERENCES = 1e-5
"""A float32 derivative beside a central difference in float64: some tens of roundings of 6e-8, and
1e-10 for the square of the step times third derivatives."""

SEPARATED = 2.0**-30
"""What a bias less its key bias may vary by, relative to the larger of the two, or to 1: float64
sums whose terms are up to 2**20 times as large as their differences, 53 bits less 20."""


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
