"""The type of a layer where a configuration has no ``layer_types``, and whether it rotates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]
LayerType: TypeAlias = Callable[[Config, int], str]

NEAR, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
TYPES = (NEAR, CHUNKED, FULL, "indexed_attention")


def by_pattern(default: int) -> LayerType:
    """Every so many-th layer is full: ``sliding_window_pattern``, or the default."""

    def kind(part: Config, layer: int) -> str:
        pattern = part.get("sliding_window_pattern") or default
        if isinstance(pattern, str):
            full = pattern[layer % len(pattern)] == "G"
        else:
            full = (layer + 1) % pattern == 0
        return FULL if full or not part["sliding_window"] else NEAR

    return kind


def gemma4(part: Config, layer: int) -> str:
    """Gemma 4: every sixth layer is full, and the last in any case."""
    last = layer == part["num_hidden_layers"] - 1
    return FULL if last else by_pattern(6)(part, layer)


def all_alike(part: Config, layer: int) -> str:
    """Every layer has the window, if there is one."""
    return NEAR if part["sliding_window"] else FULL


def all_if_used(part: Config, layer: int) -> str:
    """Every layer has the window, if it is used."""
    return NEAR if _uses_window(part) else FULL


def in_later_layers(part: Config, layer: int) -> str:
    """Qwen: layers from ``max_window_layers`` on have a window."""
    return NEAR if _uses_window(part) and layer >= part["max_window_layers"] else FULL


def in_early_even_layers(part: Config, layer: int) -> str:
    """Qwen 2 MoE: every other layer below ``max_window_layers`` has a window."""
    has = _uses_window(part) and layer % 2 == 0 and layer < part["max_window_layers"]
    return NEAR if has else FULL


def where_not_rotating(part: Config, layer: int) -> str:
    """SmolLM3: NoPE layers have the window, if there is one."""
    return NEAR if _uses_window(part) and not listed(part, layer, False) else FULL


def where_rotating(part: Config, layer: int) -> str:
    """Llama 4: layers with RoPE have chunks."""
    return CHUNKED if listed(part, layer, False) else FULL


def never(part: Config, layer: int) -> str:
    """Every layer sees every key."""
    return FULL


ALIKE = (all_alike, all_if_used, never)
"""Those of classes that do not read ``layer_types``."""


def always(part: Config, layer: int, near: bool) -> bool:
    """Every layer rotates."""
    return True


def near(part: Config, layer: int, near: bool) -> bool:
    """Cohere 2: RoPE is on layers with a window, and without one nowhere."""
    return near and bool(part["sliding_window"])


def near_if_any(part: Config, layer: int, near: bool) -> bool:
    """EXAONE 4: RoPE is on layers with a window, and without one everywhere."""
    return near or not part["sliding_window"]


def listed(part: Config, layer: int, near: bool) -> bool:
    """``no_rope_layers`` has 1 where a layer rotates."""
    given = part.get("no_rope_layers")
    return bool(given[layer]) if given else (layer + 1) % part.get("no_rope_layer_interval", 4) != 0


def _uses_window(part: Config) -> bool:
    return bool(part.get("use_sliding_window") and part.get("sliding_window"))
