"""One side of a call of attention, queries or keys: what is known of its tokens beside vectors.

Tiles slice it, rings send it, kernels load it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from posenc.protocol import Array


class Side(NamedTuple):
    """Tokens of one side.

    Attributes
    ----------
    pos
        Integer positions, ``(L,)`` or ``(B, L)``. They decide order, masks, sums and caches.
    seg
        Segments, likewise; None without segments.
    places
        What a bias on one axis reads instead of positions, likewise; None: the positions.
    features
        By name, ``(B or 1, H or 1, L)`` or ``(B or 1, H or 1, L, M)``.
    """

    pos: Array
    seg: Array | None
    places: Array | None
    features: dict[str, Array]

    @property
    def encoded_pos(self) -> Array:
        """What a bias reads as ``q`` or ``k``."""
        return self.pos if self.places is None else self.places

    def select(self, tokens: slice, heads: slice = slice(None)) -> Side:
        """Some of the tokens, and of heads; views."""
        pos, seg, places = (
            None if a is None else a[..., tokens] for a in (self.pos, self.seg, self.places)
        )
        features = {n: _of_heads(a, heads)[:, :, tokens, ...] for n, a in self.features.items()}
        return Side(pos, seg, places, features)

    def map_features(self, function: Callable[[Array], Any]) -> Side:
        """A function of every feature; integers as they are."""
        return self._replace(features={n: function(a) for n, a in self.features.items()})


def _of_heads(array: Array, heads: slice) -> Array:
    return array if array.shape[1] == 1 else array[:, heads, ...]
