"""Facts: what a scheme says of itself in its first line.

``class ALiBi(PositionScheme, relative=True)``
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from posenc.contract.declared import Declared


class Facts(Declared):
    """The class keywords of a scheme, which become attributes; others are a ``TypeError``."""

    relative: bool = False
    """Whether ``bias`` depends on positions only through ``k_pos - q_pos``. It may read features
    too."""

    axes: int = 1
    """Number of coordinates of a token: 1 for text, 2 for an image. With more than one,
    ``transform`` and ``embedding`` receive coordinates ("places") ``(..., L, axes)`` instead of
    positions. ``bias`` reads them as ``params.query["places"][axis]`` and
    ``params.key["places"][axis]``. Every token still has one integer position, which alone decides
    order, masks, cumulative sums and caches. If it depends on options, it is a field."""

    shared: bool = False
    """Whether the layers of a model share one set of learned params, as T5 does."""

    whole_rows: str = ""
    """Why ``adjust_scores`` needs whole rows of scores, for the error of implementations that have
    only tiles of them."""

    key_paths: bool = False
    """Whether ``adjust_scores`` goes along the tokens between a key and its query. It then gets
    keys in the order of their positions within each segment, whatever their order in memory, and
    many queries at a time: each block of them goes along the same keys again."""

    mixes_heads: str = ""
    """Why one head needs others, or which of all heads it is, for the error of ``HeadSlice``. Empty
    if a head depends only on its own rows of arrays: then methods read the number of heads from
    arrays, not from a field."""

    paper: str = ""
    """Authors, year and arXiv number, for the catalogue and the end of the docstring."""

    trained_as: str | None = None
    """Name in the catalogue of the scheme that models are trained with, if this one extends them
    without training. A study of the whole catalogue then trains that one and tests this one."""

    _FACTS: ClassVar[Mapping[str, type]] = {
        "relative": bool, "axes": int, "shared": bool, "whole_rows": str,
        "key_paths": bool, "mixes_heads": str, "paper": str, "trained_as": str,
    }  # fmt: skip
