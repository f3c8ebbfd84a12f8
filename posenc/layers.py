"""The layers of a model: the scheme and window of each, and which of them share learned arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posenc.checks import check_count, check_scheme
from posenc.evaluate import has_embedding
from posenc.params import is_floating
from posenc.protocol import Array, Namespace, PositionScheme


@dataclass(frozen=True)
class LayerPlan:
    """One scheme and one window per layer of a model.

    Layers whose schemes are equal share one set of learned arrays if the scheme is ``shared`` or
    has an embedding, which is added once, before the first layer. Every other layer has its own.
    Windows change nothing about that.

    Attributes
    ----------
    schemes
        One a layer.
    windows
        One a layer: an integer ``W``, for a query that sees keys at ``|q_pos - k_pos| < W``, or
        None for all of them. Given as an empty tuple, no layer has one.
    """

    schemes: tuple[PositionScheme, ...]
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        windows = tuple(map(_window, self.windows)) or (None,) * len(self.schemes)
        if len(windows) != len(self.schemes):
            raise ValueError(f"windows must be {len(self.schemes)}, one a layer, got {windows}")
        object.__setattr__(self, "windows", windows)

    @classmethod
    def of(
        cls,
        scheme: PositionScheme | Sequence[PositionScheme],
        layers: int,
        windows: int | Sequence[int | None] | None = None,
    ) -> LayerPlan:
        """A plan of ``layers`` layers.

        Parameters
        ----------
        scheme
            One for every layer, or a list or tuple of 1 to ``layers`` that layers take in turn.
        layers
            Number of layers.
        windows
            Likewise: None, an integer of at least 1, or a list or tuple of them. It goes in turn
            by itself, as many as there are: ``windows=[512, 512, None]`` serves one scheme too.

        Raises
        ------
        TypeError, ValueError
            None of these, or more of them than layers.
        """
        count = check_count("layers", layers)
        schemes = _in_turn("scheme", scheme, count)
        for one in schemes:
            check_scheme(one)
        return cls(schemes, _in_turn("windows", windows, count))

    def windows_within(self, window: int | None) -> tuple[int | None, ...]:
        """The layers' windows where all attention lies inside ``window``: the narrower of both."""
        return tuple(min((w for w in (own, window) if w), default=None) for own in self.windows)

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


def add_embedding(x: Array, term: Array, *, xp: Namespace) -> Array:
    """``x (..., L, dim)`` plus the embedding of its positions, rounded once to x's dtype."""
    if not is_floating(x, xp) or tuple(x.shape[-2:]) != tuple(term.shape[-2:]):
        raise ValueError(
            f"x must be floating and end in the length of pos and the width of the embedding, "
            f"{tuple(term.shape[-2:])}, got {tuple(x.shape)} of {x.dtype}"
        )
    return xp.astype(x + term, x.dtype, copy=False)


def _in_turn(name: str, given: Any, layers: int) -> tuple[Any, ...]:
    """One a layer, from one or from several in turn."""
    several = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not 1 <= len(several) <= layers:
        raise ValueError(f"{name} must be one, or 1 to layers={layers} of them, got {several!r}")
    return tuple(several[layer % len(several)] for layer in range(layers))


def _window(given: Any) -> int | None:
    return None if given is None else check_count("windows", given)


def _once(scheme: PositionScheme) -> bool:
    """Whether a model has one set of the scheme's arrays, not one per layer."""
    return scheme.shared or has_embedding(scheme)
