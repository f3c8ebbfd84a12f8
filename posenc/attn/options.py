"""The keywords that every attention function takes, written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict

from posenc.protocol import Array
from posenc.rotary_tables import Rotary

MaskFunction: TypeAlias = Callable[..., Array]


class Options(TypedDict, total=False):
    """Keywords of ``posenc.attention``, whose docstring explains them."""

    q_pos: Array | None
    k_pos: Array | None
    q_seg: Array | None
    k_seg: Array | None
    q_axes: Array | None
    k_axes: Array | None
    k_valid: Array | None
    window: int | tuple[int | None, int | None] | None
    sink_tokens: int
    bias: Array | None
    mask: Array | MaskFunction | None
    softcap: float | None
    scale: float | None
    k_transformed: bool
    x: Array | None
    q_x: Array | None
    q_features: Mapping[str, Array] | None
    k_features: Mapping[str, Array] | None
    q_rotary: Rotary | None
    k_rotary: Rotary | None
    return_lse: bool


ARRAYS = (
    "q_pos",
    "k_pos",
    "q_seg",
    "k_seg",
    "q_axes",
    "k_axes",
    "k_valid",
    "bias",
    "mask",
    "x",
    "q_x",
)
"""Names of options that are arrays."""
FEATURES = ("q_features", "k_features")
"""Names of options that map names to arrays."""


def map_arrays(options: Options, function: Callable[[Any], Any]) -> Options:
    """The options with ``function`` applied to every array."""
    mapped: dict[str, Any] = dict(options)
    for name in ARRAYS:
        if mapped.get(name) is not None and not callable(mapped[name]):
            mapped[name] = function(mapped[name])
    for name in FEATURES:
        if isinstance(mapped.get(name), Mapping):
            mapped[name] = {n: function(a) for n, a in mapped[name].items()}
    return mapped  # type: ignore[return-value]  # a dict with the keys of Options


def float_arrays(options: Options) -> list[Any]:
    """The arrays among the options whose dtype may make the working dtype float64."""
    arrays: list[Any] = [options.get("x"), options.get("q_x"), options.get("bias")]
    for features in (options.get("q_features"), options.get("k_features")):
        if isinstance(features, Mapping):
            arrays += features.values()
    return [array for array in arrays if array is not None]
