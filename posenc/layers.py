"""The layers of a model: the scheme and window of each, and the layers that share params."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posenc.apply.embed import has_embedding
from posenc.contract.checks import check_count, check_scheme
from posenc.contract.fields import check_equality
from posenc.contract.params import is_floating
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme

__all__ = ["LayerPlan"]


@dataclass(frozen=True)
class LayerPlan:
    """One scheme and one window per layer of a model.

    Layers with equal schemes share one set of learned arrays in two cases: the scheme is
    ``shared``, or it has an embedding, which is added once, before the first layer. Every other
    layer has its own set. Windows have no influence on this.

    Attributes
    ----------
    schemes
        One per layer.
    windows
        One per layer: an integer ``W``, which leaves keys at ``|q_pos - k_pos| < W`` visible, or
        None for no window. An empty tuple gives no layer a window.
    """

    schemes: tuple[PositionScheme, ...]
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        check_equality("scheme", tuple(self.schemes))
        windows = tuple(map(_window, self.windows)) or (None,) * len(self.schemes)
        if len(windows) != len(self.schemes):
            raise ValueError(f"windows must be {len(self.schemes)}, one per layer, got {windows}")
        object.__setattr__(self, "windows", windows)

    @classmethod
    def of(
        cls,
        scheme: PositionScheme | Sequence[PositionScheme] | LayerPlan,
        layers: int | None = None,
        windows: int | Sequence[int | None] | None = None,
    ) -> LayerPlan:
        """A plan of ``layers`` layers.

        Parameters
        ----------
        scheme
            One for every layer, or a list or tuple of 1 to ``layers`` that the layers repeat. A
            plan is returned as it is.
        layers
            Number of layers; a plan has its own.
        windows
            Likewise: None, an integer of at least 1, or a list or tuple of them. Schemes and
            windows repeat independently: ``windows=[512, 512, None]`` works with one scheme too.

        Raises
        ------
        TypeError, ValueError
            An argument is none of these, or is longer than ``layers``; a plan has another number
            of layers, or comes with windows.
        """
        if isinstance(scheme, LayerPlan):
            scheme._check_alone(layers, windows)
            return scheme
        if not isinstance(scheme, list | tuple):  # before layers, which a wrong scheme may lack too
            check_scheme(scheme)
        if layers is None:
            raise TypeError("layers is missing; only a LayerPlan has its own number of layers")
        count = check_count("layers", layers)
        schemes = _repeat("scheme", scheme, count)
        for each in schemes:
            check_scheme(each)
        return cls(schemes, _repeat("windows", windows, count))

    def _check_alone(self, layers: int | None, windows: Any) -> None:
        """Check that the arguments beside a plan do not contradict it."""
        own = len(self.schemes)
        if layers is not None and check_count("layers", layers) != own:
            raise ValueError(
                f"layers must be {own}, the number of layers of the plan, got {layers}"
            )
        if windows is not None:
            raise ValueError(f"windows come from the plan, got windows={windows!r}")

    def __len__(self) -> int:
        return len(self.schemes)

    def windows_within(self, window: int | None) -> tuple[int | None, ...]:
        """For each layer, the narrower of its own window and ``window``."""
        return tuple(min((w for w in (own, window) if w), default=None) for own in self.windows)

    @property
    def sources(self) -> tuple[int, ...]:
        """For each layer, the first layer that has the same set of learned arrays."""
        return tuple(
            self.schemes.index(scheme) if _is_shared(scheme) else layer
            for layer, scheme in enumerate(self.schemes)
        )

    @property
    def rotary_layers(self) -> tuple[int, ...]:
        """For each layer, the first layer that has the same ``posenc.rotary``."""
        return rotary_layers(self.schemes, self.sources)

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The first layer of each set of learned arrays."""
        return tuple(dict.fromkeys(self.sources))

    @property
    def owners(self) -> tuple[int, ...]:
        """For each layer, the index of its set of learned arrays."""
        first_layers = self.first_layers
        return tuple(first_layers.index(source) for source in self.sources)


def rotary_layers(schemes: Sequence[PositionScheme], sources: Sequence[int]) -> tuple[int, ...]:
    """For each layer, the first layer that has the same ``posenc.rotary`` at the same positions.

    ``sources`` tells which set of learned arrays a layer has, by any number.
    """

    def shares(layer: int, other: int) -> bool:
        # Schemes without tables are not compared: arrays among their fields may not compare.
        one = schemes[layer]
        if layer == other or not one.hooks() & {Hook.ROTARY, Hook.REGIONS}:
            return layer == other
        same_arrays = sources[layer] == sources[other] or not one.rotary_params()
        return one == schemes[other] and same_arrays

    layers = range(len(schemes))
    return tuple(next(o for o in layers if shares(layer, o)) for layer in layers)


def check_layer(layer: int, layers: int) -> int:
    """``layer`` as an integer in ``-layers .. layers - 1``; as in a list, -1 is the last."""
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


def _repeat(name: str, given: Any, layers: int) -> tuple[Any, ...]:
    """One value per layer, from one value or from a list that is repeated."""
    several = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not 1 <= len(several) <= layers:
        raise ValueError(f"{name} must be one, or 1 to layers={layers} of them, got {several!r}")
    return tuple(several[layer % len(several)] for layer in range(layers))


def _window(given: Any) -> int | None:
    return None if given is None else check_count("windows", given)


def _is_shared(scheme: PositionScheme) -> bool:
    """Whether a model has one set of the scheme's arrays, not one per layer."""
    return scheme.shared or has_embedding(scheme)
