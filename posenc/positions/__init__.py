"""Positions of tokens: packing, padding, grids, fractions, images beside text."""

from posenc.positions.images import (
    Patches,
    hunyuan_mixed,
    left_padded_mixed,
    mixed,
    packed_mixed,
    text_places,
)
from posenc.positions.integers import (
    MAX_POSITION,
    MIN_POSITION,
    fractional,
    grid,
    left_padded,
    packed,
    randomised,
    visible,
)

__all__ = [
    "MAX_POSITION",
    "MIN_POSITION",
    "Patches",
    "fractional",
    "grid",
    "hunyuan_mixed",
    "left_padded",
    "left_padded_mixed",
    "mixed",
    "packed",
    "packed_mixed",
    "randomised",
    "text_places",
    "visible",
]
