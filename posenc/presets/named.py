"""What makes a function a plan with a name: sizes that it ignores, fitting to a small model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from posenc.contract.checks import check_count
from posenc.contract.protocol import PositionScheme
from posenc.layers import LayerPlan
from posenc.schemes.sizes import taking_sizes

T = TypeVar("T")
PLANS: dict[str, Callable[..., LayerPlan]] = {}
"""The plans by name, for labels on the command line."""


def named_plan(function: Callable[..., LayerPlan]) -> Callable[..., LayerPlan]:
    """Enter a plan into ``PLANS``: it then ignores sizes that it does not use, and is fitted."""
    maker = ignoring_sizes(function)

    @functools.wraps(function)
    def plan(**given: Any) -> LayerPlan:
        return maker(**{**fitted_options(function.__name__, given), **given})

    PLANS[function.__name__] = plan
    return plan


def ignoring_sizes(function: Callable[..., T]) -> Callable[..., T]:
    """``function``, which ignores sizes of a model that it does not name, as makers of schemes."""
    return taking_sizes(function, also=("layers",))


def fitted_options(name: str, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Options of a plan that follow from the sizes of a small model, if they are not given.

    ``{}`` without ``train_len``. Else a window or a chunk has at most half of ``train_len``,
    because one of all of it has no effect in training, and a group has at most ``layers`` layers.
    """
    if sizes.get("train_len") is None:
        return {}
    released = {key: p.default for key, p in inspect.signature(PLANS[name]).parameters.items()}
    half = max(1, check_count("train_len", sizes["train_len"]) // 2)
    layers = check_count("layers", sizes.get("layers", released["layers"]))
    most = {"window": half, "chunk": half, "every": layers}
    return {key: min(released[key], size) for key, size in most.items() if released.get(key)}


def groups(
    layers: int,
    every: int,
    near: PositionScheme,
    full: PositionScheme,
    *,
    window: int | None,
    full_window: int | None = None,
    first: bool = False,
) -> LayerPlan:
    """Groups of ``every`` layers: the last, or the ``first``, is ``full``, all others ``near``."""
    every = check_count("every", every)
    place = 0 if first else every - 1
    is_full = [layer % every == place for layer in range(check_count("layers", layers))]
    return LayerPlan(
        tuple(full if yes else near for yes in is_full),
        tuple(full_window if yes else window for yes in is_full),
    )
