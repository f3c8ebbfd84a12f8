"""Inputs that any language can make again: an integer hash, and no random generator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def hashed(shape: tuple[int, ...], stream: int, denominator: int = 32) -> Array:
    """Multiples of ``1 / denominator`` from ``-64`` to ``64`` of them, as float32.

    Number ``i``, in row-major order, is ``(h(i, stream) % 129 - 64) / denominator``; all operations
    of ``h`` are on unsigned 32-bit integers::

        h = (i * 2654435761 + stream * 2246822519 + 374761393) mod 2**32
        h = ((h ^ h >> 15) * 2246822519) mod 2**32
        h = ((h ^ h >> 13) * 3266489917) mod 2**32
        h =   h ^ h >> 16

    With a denominator that is a power of two, float32, bfloat16 and float16 hold them exactly.
    """
    index = np.arange(math.prod(shape), dtype=np.uint64)
    low = np.uint64(2**32 - 1)
    h = (index * np.uint64(2654435761) + np.uint64(stream * 2246822519 + 374761393)) & low
    h = ((h ^ (h >> np.uint64(15))) * np.uint64(2246822519)) & low
    h = ((h ^ (h >> np.uint64(13))) * np.uint64(3266489917)) & low
    h ^= h >> np.uint64(16)
    numbers = (h % np.uint64(129)).astype(np.int64) - 64
    return (numbers / denominator).astype(np.float32).reshape(shape)
