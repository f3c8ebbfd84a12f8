"""How long a context RoPE's frequencies can serve: Men et al. 2024, arXiv 2405.14591."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BOUNDS = ((1024, 4.3e3), (4096, 2.7e4), (16_384, 3.1e5), (131_072, 7.8e6), (1_048_576, 5.1e8))
"""Lengths and the least base for each, from the paper's table 2, whose heads have 128 channels."""


def length_by_base(base: float) -> float:
    """The length whose least base this is: an entry of ``BOUNDS``, or between two of them.

    Logarithms are interpolated. The result is 0 below the first base and infinite above the last.
    """
    lengths, bases = zip(*BOUNDS, strict=True)
    if not bases[0] <= base <= bases[-1]:
        return 0.0 if base < bases[0] else math.inf
    return float(np.exp(np.interp(math.log(base), np.log(bases), np.log(lengths))))


def length_by_cosines(frequencies: Sequence[float], limit: int = 2**20) -> int:
    """The first distance at which ``sum(cos(distance * f))`` is negative, at most ``limit``.

    That is the paper's criterion: up to there a query expects a higher score from a key
    that is like it than from any other key.
    """
    step = 2**14
    for start in range(0, limit, step):
        distances = np.arange(start, min(start + step, limit), dtype=np.float64)
        total = np.zeros(len(distances))
        for frequency in frequencies:
            total += np.cos(distances * frequency)
        if (total < 0).any():
            return start + int(np.argmax(total < 0))
    return limit
