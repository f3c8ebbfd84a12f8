"""posenc for JAX: attention with any scheme, in the layout of ``jax.nn``."""

from typing import Any

from posenc_jax.api import IMPLEMENTATIONS, attention, explain
from posenc_jax.labels import param_labels
from posenc_jax.params import init
from posenc_jax.position import Position, Positions
from posenc_jax.ring import ring_attention, zigzag

__all__ = [
    "IMPLEMENTATIONS",
    "Position",
    "Positions",
    "attention",
    "explain",
    "init",
    "param_labels",
    "ring_attention",
    "zigzag",
]


def __getattr__(name: str) -> Any:
    """``posenc_jax.equinox`` and ``.flax``, when they are first read: each needs its library."""
    if name in ("equinox", "flax"):
        import importlib

        return importlib.import_module(f"posenc_jax.{name}")
    raise AttributeError(f"module 'posenc_jax' has no attribute {name!r}")
