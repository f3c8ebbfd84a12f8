"""The layers of a model: which scheme serves each, and which of them share learned arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from posenc.checks import check_count, check_scheme
from posenc.params import is_floating
from posenc.protocol import Array, Namespace, PositionScheme


@dataclass(frozen=True)
class LayerPlan:
    """One scheme per layer of a model.

    Layers whose schemes are equal share one set of learned arrays if the scheme is ``shared`` or
    has an embedding, which is added once, before the first layer. Every other layer has its own.
    """

    schemes: tuple[PositionScheme, ...]

    @classmethod
    def of(cls, scheme: PositionScheme | Sequence[PositionScheme], layers: int) -> LayerPlan:
        """A plan of ``layers`` layers from one scheme, or from a list or tuple taken in turn."""
        count = check_count("layers", layers)
        given = tuple(scheme) if isinstance(scheme, list | tuple) else (scheme,)
        if not 1 <= len(given) <= count:
            raise ValueError(f"scheme must be one, or 1 to layers={count} of them, got {given!r}")
        for one in given:
            check_scheme(one)
        return cls(tuple(given[layer % len(given)] for layer in range(count)))

    @property
    def sources(self) -> tuple[int, ...]:
        """For each layer, the first layer that has the same set of learned arrays."""
        return tuple(
            self.schemes.index(scheme) if _once(scheme) else layer
            for layer, scheme in enumerate(self.schemes)
        )

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The first layer of each set of learned arrays; its embedding is added at the input."""
        return tuple(dict.fromkeys(self.sources))

    @property
    def owners(self) -> tuple[int, ...]:
        """For each layer, the number of its set of learned arrays."""
        first_layers = self.first_layers
        return tuple(first_layers.index(source) for source in self.sources)


def check_layer(layer: int, layers: int) -> int:
    """``layer`` as an index of ``layers`` layers; as in a list, -1 is the last."""
    index = operator.index(layer)
    if not -layers <= index < layers:
        raise IndexError(f"layer must be 0 .. {layers - 1}, got {layer!r}")
    return index


def has_embedding(scheme: PositionScheme) -> bool:
    """Whether a scheme acts on token embeddings."""
    return type(scheme).embedding is not PositionScheme.embedding


def add_embedding(x: Array, term: Array, *, xp: Namespace) -> Array:
    """``x (..., L, dim)`` plus the embedding of its positions, rounded once to x's dtype."""
    if not is_floating(x, xp) or tuple(x.shape[-2:]) != tuple(term.shape[-2:]):
        raise ValueError(
            f"x must be floating and end in the length of pos and the width of the embedding, "
            f"{tuple(term.shape[-2:])}, got {tuple(x.shape)} of {x.dtype}"
        )
    return xp.astype(x + term, x.dtype, copy=False)


def _once(scheme: PositionScheme) -> bool:
    """Whether a model has one set of the scheme's arrays, not one per layer."""
    return scheme.shared or has_embedding(scheme)
