"""How far two rotations are apart: where scores of unit vectors begin to differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posenc.contract.protocol import Array
from posenc.testing.tolerances import UNIT

VISIBLE = 1e-3
"""A difference of a score of unit vectors that counts: float16 rounds a score of 1 by half of it.

It only says from which position on a difference is told. Whether two frequencies are equal is
decided by ``frequency_bound``.
"""


@dataclass(frozen=True)
class Rotation:
    """One rotation: frequencies in radians per position, and which channels pair up."""

    frequencies: Sequence[float]
    layout: str = "half"


@dataclass(frozen=True)
class Difference:
    """How far two rotations are apart.

    Attributes
    ----------
    first
        The least distance of a query and a key at which a score of unit vectors differs by more
        than ``VISIBLE``; None: none up to ``far``.
    largest
        The largest difference of a score of unit vectors at distance ``far``, at most 2.
    cosine
        The cosine between a vector with equal parts in every channel that either rotates, turned by
        the one, and turned by the other, at distance ``far``. 1: no difference.
    far
        That distance.
    """

    first: int | None
    largest: float
    cosine: float
    far: int

    def words(self) -> str:
        """It in a sentence."""
        if self.first is None:
            return f"scores of unit vectors differ by at most {self.largest:.2g} up to {self.far}"
        return (
            f"scores of unit vectors differ by more than {VISIBLE:g} from distance {self.first} "
            f"on, by {self.largest:.3g} at {self.far}, where the cosine between both rotations is "
            f"{self.cosine:.3f}"
        )


def difference(one: Rotation, other: Rotation, far: int) -> Difference:
    """The difference of two rotations, as matrices ``(D, D)`` that turn a query at a distance.

    The largest difference of ``q @ R @ k`` over unit vectors is the largest singular value of the
    difference of both matrices. Of pairs alike it is the largest ``2 |sin(t (f - g) / 2)|``.
    """
    f, g = np.asarray(one.frequencies, np.float64), np.asarray(other.frequencies, np.float64)
    if len(f) == len(g) and one.layout == other.layout:
        apart = np.abs(f - g)
        most = float(apart.max(initial=0))
        # The fastest difference is the first to be seen: below half a turn the sine grows.
        reach = 2 * math.asin(VISIBLE / 2)
        first = None if most * far <= reach else max(1, math.floor(reach / most) + 1)
        largest = float(np.max(2 * np.abs(np.sin(far * apart / 2)), initial=0))
        cosine = float(np.mean(np.cos(far * (f - g)))) if len(f) else 1.0
        return Difference(first, largest, cosine, far)
    width = 2 * max(len(f), len(g))
    distances = [*range(1, 65), *(2**n for n in range(7, 31))]
    first = next(
        (t for t in distances if t <= far and _apart(one, other, width, t)[0] > VISIBLE), None
    )
    largest, cosine = _apart(one, other, width, far)
    return Difference(first, largest, cosine, far)


def _apart(one: Rotation, other: Rotation, width: int, distance: int) -> tuple[float, float]:
    first, second = _matrix(one, width, distance), _matrix(other, width, distance)
    even = np.full(width, 1 / math.sqrt(width))
    return float(np.linalg.norm(first - second, 2)), float((first @ even) @ (second @ even))


def _matrix(rotation: Rotation, width: int, distance: int) -> Array:
    """``(width, width)``: channels that do not rotate stay."""
    angles = distance * np.asarray(rotation.frequencies, np.float64)
    layout, _, way = rotation.layout.partition(", ")
    if way:
        angles = -angles
    pairs = np.arange(len(angles))
    interleaved = layout == "interleaved"
    first = 2 * pairs if interleaved else pairs
    second = first + (1 if interleaved else len(pairs))
    turned = np.eye(width)
    turned[first, first] = turned[second, second] = np.cos(angles)
    turned[first, second], turned[second, first] = -np.sin(angles), np.sin(angles)
    return turned


def frequency_bound(frequencies: Sequence[float], base: float) -> Array:
    """How far float32 may be from each frequency.

    A power ``base**-e`` is off by ``ln(base) + 8`` roundings: the exponent's moves it by ``ln
    base`` of them, the base's by one, the power itself is within four, its reciprocal and one
    factor add three. A blend of a frequency and a scaled one is off by its weight's error too,
    which is a part of the plain frequency: five times in all.
    """
    plain = base ** (-np.arange(len(frequencies)) / max(1, len(frequencies)))
    scale = np.maximum(np.abs(np.asarray(frequencies, np.float64)), plain)
    bound: Array = 5 * (math.log(max(base, 1.0)) + 8) * UNIT["float32"] * scale
    return bound
