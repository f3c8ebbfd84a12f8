"""Where a number of a result belongs: its sequence, head, query and key, for messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Index: TypeAlias = tuple[int, ...]
Where: TypeAlias = Callable[[Index], str]


def first_index(wrong: Any) -> Index:
    """The index of the first True."""
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def of_pairs(q_pos: Any, k_pos: Any) -> Where:
    """Names places in ``(H, Q, K)`` or ``(B, H, Q, K)`` at positions ``(L,)`` or ``(B, L)``."""

    def where(index: Index) -> str:
        *batch, head, i, j = index
        row = batch[0] if batch else 0
        pair = f"query position {_at(q_pos, row, i)}, key position {_at(k_pos, row, j)}"
        return f"batch {row}, head {head}, {pair}"

    return where


def of_tokens(name: str, pos: Any) -> Where:
    """Names places in ``(B, H, L)`` or ``(B, H, L, channels)`` of tokens called ``name``."""

    def where(index: Index) -> str:
        row, head, i, *channel = index
        token = f"batch {row}, head {head}, {name} position {_at(pos, row, i)}"
        return f"{token}, channel {channel[0]}" if channel else token

    return where


def _at(pos: Any, row: int, i: int) -> int:
    pos = np.asarray(pos)
    if pos.ndim == 1:
        return int(pos[i])
    return int(pos[min(row, len(pos) - 1), i])
