"""mlx-lm as a reader of configurations: what the attention of its own models computes.

A model is built without weights: MLX makes an array when its numbers are asked, and nobody asks.
A spy in place of its rotary module sees whether the attention of a layer rotates, and how wide its
heads are; then the module itself turns unit vectors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import _get_classes

from posenc.audit.readers import Facts, NotReadError, Said, Unsaid
from posenc.testing.framework import Host

_WINDOWS = Unsaid("mlx-lm makes windows by its caches, which are not asked")
_AXES = Unsaid("mlx-lm rotates text alone, whose coordinates are equal")
_SCALING = ("rope_scaling", "rope_parameters")
_SEEN = 1e-3  # sines below it may be rounding
_MOST = 2**28  # numbers of the longest text that is rotated


class MlxLm:
    """The installed mlx-lm."""

    name = "mlx_lm"

    def __init__(self) -> None:
        self.version = version("mlx-lm")

    def read(self, config: Mapping[str, Any], lengths: Sequence[int]) -> list[Facts]:
        """As ``Reader.read``: one entry for the layers whose facts are equal."""
        layers = _attentions(config, self.version)
        try:
            plain = _attentions(_unscaled(config), self.version)
        except Exception:  # a model that always scales
            plain = {}
        axes = None if "section" not in str(config) else _AXES
        found: dict[Any, tuple[Facts, list[int]]] = {}
        for number, attention in layers.items():
            spied = _spied(attention, _width(config))
            kind = _kind(config, number, attention)
            key = kind, _key(attention, spied)
            if key not in found:
                facts = replace(_facts(attention, spied, lengths), kind=kind)
                scale = _scale(attention, plain.get(number))
                found[key] = replace(facts, softmax_factor=scale, sections=axes), []
            found[key][1].append(number)
        return [replace(facts, layers=tuple(numbers)) for facts, numbers in found.values()]


def _attentions(config: Mapping[str, Any], number: str) -> dict[int, Any]:
    """The attention module of each layer that has one."""
    given = copy.deepcopy(dict(config))
    try:
        model, arguments = _get_classes(given)
    except ValueError as error:
        raise NotReadError(f"mlx-lm {number}: {error}") from None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what it says of scaling is measured here
            built: Any = model(arguments.from_dict(given))
    except TypeError as error:
        if "required positional argument" not in str(error):
            raise
        names = ", ".join(re.findall(r"'(\w+)'", str(error)))
        raise NotReadError(f"mlx-lm {number} needs keys that are missing: {names}") from None
    found = {}
    for layer, block in enumerate(built.layers):
        attentions = [m for _, m in block.named_modules() if "Attention" in type(m).__name__]
        rotating = [m for m in attentions if "rope" in m]
        if attentions:
            found[layer] = (rotating or attentions)[0]
    if not found:
        raise NotReadError(f"no attention is found in {model.__module__}")
    return found


def _unscaled(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without scaling of positions, also in the part of the text."""
    given = {key: value for key, value in config.items() if key not in _SCALING}
    for name in ("text_config", "llm_config"):
        if isinstance(given.get(name), Mapping):
            given[name] = _unscaled(given[name])
    return given


def _kind(config: Mapping[str, Any], layer: int, attention: Any) -> str:
    """The type of a layer, by the configuration or by the module's own word."""
    types = _text(config).get("layer_types")
    if isinstance(types, Sequence) and layer < len(types):
        return str(types[layer])
    words = ("is_sliding", "is_sliding_window", "use_sliding_window", "sliding", "is_local")
    own = next((v for n in words if isinstance(v := getattr(attention, n, None), bool)), None)
    return "" if own is None else ("sliding_attention" if own else "full_attention")


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the text."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _width(config: Mapping[str, Any]) -> int:
    return int(_text(config).get("hidden_size", config.get("hidden_size", 0)))


class _Spy:
    """In place of a rotary module: it keeps the width of what it was given, and stops."""

    width: int | None = None

    def __call__(self, x: Any, *rest: Any, **more: Any) -> Any:
        self.width = int(x.shape[-1])
        raise _SeenError


class _SeenError(Exception):
    """The rotation was reached."""


def _spied(attention: Any, width: int) -> Said[int | None]:
    """The width of the vectors that the attention rotates; None: it rotates none."""
    if "rope" not in attention:
        return None
    own, spy = attention.rope, _Spy()
    attention.rope = spy
    try:
        attention(mx.zeros((1, 2, width)), mask=None, cache=None)
    except _SeenError:
        return spy.width
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        return Unsaid(f"the attention of mlx-lm could not be called with a prompt: {what}")
    finally:
        attention.rope = own
    return None


def _key(attention: Any, spied: Said[int | None]) -> Any:
    """Equal for layers whose rotation is equal."""
    rope = attention.rope if "rope" in attention else None
    if rope is None:
        return spied
    arrays = [np.array(value).tobytes() for value in dict(rope).values() if _is_array(value)]
    numbers = [(k, v) for k, v in vars(rope).items() if isinstance(v, int | float | str)]
    return type(rope).__name__, tuple(arrays), tuple(sorted(map(str, numbers))), spied


def _is_array(value: Any) -> bool:
    return isinstance(value, mx.array)


def _facts(attention: Any, width: Said[int | None], lengths: Sequence[int]) -> Facts:
    facts = Facts(window=_WINDOWS)
    if isinstance(width, Unsaid):
        return _unknown(facts, width)
    size = 0
    if width is not None:
        rope = attention.rope
        still, turned = (_units(rope, width, offset) for offset in (0, 1))
        size = _size(rope, still, width)
    if width is None or size == 0:
        nothing = Unsaid("these layers do not rotate")
        return replace(
            facts, frequencies=dict.fromkeys(lengths, ()), layout=nothing, rotary_dim=0,
            attention_factor=nothing,
        )  # fmt: skip
    pairs = size // 2
    layouts = {
        "half": (np.arange(pairs), np.arange(pairs) + pairs),
        "interleaved": (2 * np.arange(pairs), 2 * np.arange(pairs) + 1),
    }
    partner = 1 + int(np.argmax(np.abs(turned[0, 1:])))
    layout = next((n for n, (_, second) in layouts.items() if second[0] == partner), "")
    if not layout or abs(turned[0, partner]) < _SEEN:
        return _unknown(facts, Unsaid(f"channel 0 turns with channel {partner}: no known layout"))
    first, second = layouts[layout]
    back = turned[0, partner] < 0
    return replace(
        facts,
        frequencies=_frequencies(rope, width, first, second, lengths),
        layout=f"{layout}{', the other way' if back else ''}",
        rotary_dim=size,
        attention_factor=float(still[0, 0]),
    )


def _unknown(facts: Facts, why: Unsaid) -> Facts:
    return replace(facts, frequencies=why, layout=why, rotary_dim=why, attention_factor=why)


def _units(rope: Any, width: int, offset: int) -> Host:
    """``(D, D)``: each unit vector turned at a position."""
    units = mx.eye(width)[None, :, None]
    return np.asarray(np.array(rope(units, offset=offset))[0, :, 0], np.float64)


def _size(rope: Any, still: Host, width: int) -> int:
    """How many channels rotate."""
    for name in ("dims", "dim"):
        if isinstance(getattr(rope, name, None), int):
            return int(getattr(rope, name))
    far = _units(rope, width, 100_003)
    moved = np.abs(far - still).max(1) > _SEEN
    return int(np.flatnonzero(moved)[-1]) + 1 if moved.any() else 0


def _frequencies(
    rope: Any, width: int, first: Host, second: Host, lengths: Sequence[int]
) -> Said[dict[int, tuple[float, ...]]]:
    """The angle of each pair at position 1 of a text of each length."""
    by_length = "shape" in inspect.getsource(type(rope).__call__)
    found: dict[int, tuple[float, ...]] = {}
    for length in lengths:
        tokens = max(2, length) if by_length else 2
        if tokens * width > _MOST:
            return Unsaid(f"a text of {length} tokens was not rotated: it takes too much memory")
        x = np.zeros((1, 1, tokens, width), np.float32)
        x[0, 0, 1, first] = 1
        turned = np.array(rope(mx.array(x)))[0, 0, 1].astype(np.float64)
        angles = np.arctan2(np.abs(turned[second]), turned[first])
        found[length] = tuple(float(angle) for angle in angles)
    return found


def _scale(attention: Any, plain: Any) -> Said[float]:
    """The softmax scale over that of the same module without scaled positions."""
    if plain is None:
        return Unsaid("the model of mlx-lm cannot be built without scaling")
    own, without = _scale_of(attention), _scale_of(plain)
    if own is None or not without:
        return Unsaid(f"{type(attention).__name__} of mlx-lm has no scale")
    factor = own / without
    return 1.0 if math.isclose(factor, 1, rel_tol=1e-12) else factor


def _scale_of(attention: Any) -> float | None:
    names = ("scale", "sm_scale", "softmax_scale")
    found = next((v for n in names if (v := getattr(attention, n, None)) is not None), None)
    return float(found) if isinstance(found, int | float) else None
