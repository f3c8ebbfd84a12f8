"""posenc: positional encodings, written once, for NumPy, PyTorch and JAX.

A scheme is written against the Python Array API. From that one definition, posenc computes its
bias, rotation or embedding, runs attention with it, and compares it with other schemes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posenc.attn.caches import cache_needs
from posenc.attn.features import features
from posenc.attn.reference import attention
from posenc.evaluate import bias, embedding, rotary, transform
from posenc.params import init_params
from posenc.protocol import ParamSpec, PositionScheme, SchemeWarning
from posenc.rotary_tables import Rotary
from posenc.schemes import ALiBi, Learned, NoPE, RoPE, Sinusoidal, T5Bias, catalogue, make

__all__ = [
    "ALiBi",
    "Learned",
    "NoPE",
    "ParamSpec",
    "PositionScheme",
    "RoPE",
    "Rotary",
    "SchemeWarning",
    "Sinusoidal",
    "T5Bias",
    "attention",
    "bias",
    "cache_needs",
    "catalogue",
    "embedding",
    "features",
    "init_params",
    "make",
    "rotary",
    "transform",
]
__version__ = "0.1.0"

if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> Any:
        """A public module, imported when it is asked for: ``posenc.presets.llama(...)``."""
        if name in ("hf", "layers", "positions", "presets", "study", "testing", "weights"):
            return import_module(f"posenc.{name}")
        raise AttributeError(f"module 'posenc' has no attribute {name!r}")
