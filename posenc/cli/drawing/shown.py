"""Which heads a panel shows, and the grey of keys that a query does not see."""

from __future__ import annotations

import numpy as np

from posenc.contract.protocol import Array
from posenc.study.picture import Axes

MOST_HEADS = 8
UNSEEN = "0.88"  # grey of keys outside the mask or the window


def choose_heads(heads: int, most: int = MOST_HEADS) -> list[int]:
    """Up to so many heads, evenly spaced."""
    return [int(h) for h in np.linspace(0, heads - 1, min(heads, most)).round()]


def shade_outside(axes: Axes, window: int | None, distance: Array) -> None:
    """Grey where no key is seen, on either side."""
    if window is None:
        return
    for sign in (-1, 1):
        furthest = int((sign * distance).max())
        if furthest >= window:
            ends = sign * (window - 0.5), sign * furthest
            axes.axvspan(*sorted(ends), color=UNSEEN, zorder=0.5)
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
            axes.text(sum(ends) / 2, 0.95, "outside the window", fontsize=8, **place)
