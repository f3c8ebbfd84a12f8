"""One side of a call of attention: positions, segments, places and features of its tokens.

Tiles slice it, ring attention sends it, and kernels load it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from posenc.protocol import Array


class Side(NamedTuple):
    """The tokens of the queries, or of the keys, without their vectors.

    Attributes
    ----------
    pos
        Integer positions, ``(L,)`` or ``(B, L)``. They decide order, masks, sums and caches.
    seg
        Segments, likewise; None without segments.
    places
        What the scheme encodes instead of positions, likewise; None for the positions themselves.
        With several ``axes`` there is one more axis, until the tokens are transformed.
    features
        Name -> ``(B or 1, H or 1, L)`` or ``(B or 1, H or 1, L, M)``.
    """

    pos: Array
    seg: Array | None
    places: Array | None
    features: dict[str, Array]

    @property
    def encoded_pos(self) -> Array:
        """The positions that the scheme encodes: ``places``, or ``pos`` if there are none."""
        return self.pos if self.places is None else self.places

    def select(self, tokens: slice, heads: slice = slice(None)) -> Side:
        """Views of some tokens, and of some heads."""
        pos, seg, places = (
            None if a is None else a[..., tokens] for a in (self.pos, self.seg, self.places)
        )
        features = {n: _of_heads(a, heads)[:, :, tokens, ...] for n, a in self.features.items()}
        return Side(pos, seg, places, features)

    def map_features(self, function: Callable[[Array], Any]) -> Side:
        """The same side with ``function`` applied to every feature."""
        return self._replace(features={n: function(a) for n, a in self.features.items()})


def _of_heads(array: Array, heads: slice) -> Array:
    return array if array.shape[1] == 1 else array[:, heads, ...]
