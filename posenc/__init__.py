"""posenc: positional encodings, written once, for NumPy, PyTorch and JAX.

A scheme is written against the Python Array API. From that one definition, posenc computes its
bias, rotation or embedding, runs attention with it, and compares it with other schemes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posenc import schemes
from posenc.attn.caches import cache_needs
from posenc.attn.features import features
from posenc.attn.masks import Mask, causal, window
from posenc.attn.reference import attention
from posenc.checks import nearest
from posenc.evaluate import bias, embedding, rotary, transform
from posenc.params import init_params
from posenc.protocol import FeatureSpec, ParamSpec, PositionScheme, SchemeWarning
from posenc.schemes import catalogue, make
from posenc.tokens import Rotary, Tokens

if TYPE_CHECKING:
    from posenc.schemes import ALiBi, Learned, NoPE, RoPE, Sinusoidal, T5Bias

__all__ = [
    "ALiBi",
    "FeatureSpec",
    "Learned",
    "Mask",
    "NoPE",
    "ParamSpec",
    "PositionScheme",
    "RoPE",
    "Rotary",
    "SchemeWarning",
    "Sinusoidal",
    "T5Bias",
    "Tokens",
    "attention",
    "bias",
    "cache_needs",
    "catalogue",
    "causal",
    "embedding",
    "features",
    "init_params",
    "make",
    "rotary",
    "transform",
    "window",
]
__version__ = "0.1.0"

_MODULES = ("hf", "layers", "positions", "presets", "study", "testing", "weights")

if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> Any:
        """A scheme or a public module, imported when it is asked for: ``posenc.RoPE``."""
        if name in _MODULES:
            return import_module(f"posenc.{name}")
        if name in __all__:
            found = globals()[name] = getattr(schemes, name)
            return found
        raise AttributeError(f"module 'posenc' has no attribute {name!r}{_place(name)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _place(name: str) -> str:
    """Where a name that is not here is, for an error."""
    if name.startswith("_"):  # asked by tools of every module
        return ""
    if name in schemes.__all__:
        return f"; it is posenc.schemes.{name}"
    return nearest(name, [*__all__, *_MODULES])
