"""posenc for JAX: attention with any scheme, in the layout of ``jax.nn``."""

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
