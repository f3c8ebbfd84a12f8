"""Sizes of a model, which makers of schemes and plans take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = ("num_heads", "head_dim", "max_len", "train_len", "dim", "hidden_dim")


def with_widths(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """``sizes`` with ``dim`` and ``hidden_dim``, if they follow from the others."""
    sizes = dict(sizes)
    if {"num_heads", "head_dim"} <= sizes.keys():
        sizes.setdefault("dim", sizes["num_heads"] * sizes["head_dim"])
    if "dim" in sizes:
        sizes.setdefault("hidden_dim", sizes["dim"])
    return sizes
