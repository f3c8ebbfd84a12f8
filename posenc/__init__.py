"""posenc: positional encodings, written once, for NumPy, PyTorch and JAX.

A scheme is written against the Python Array API. From that one definition, posenc computes its
bias, rotation or embedding, runs attention with it, and compares it with other schemes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what ``_HOMES`` says, for a type checker
    from posenc.apply.bias import bias
    from posenc.apply.embed import embedding
    from posenc.apply.transform import rotary, transform
    from posenc.attn.caches import cache_needs
    from posenc.attn.features import features
    from posenc.attn.masks import Mask, causal, window
    from posenc.attn.reference import attention
    from posenc.contract.fields import Count, Distance, Finite, Positive
    from posenc.contract.params import init_params
    from posenc.contract.protocol import FeatureSpec, ParamSpec, PositionScheme, SchemeWarning
    from posenc.contract.tokens import Rotary, Tokens
    from posenc.makers import catalogue, make
    from posenc.schemes import ALiBi, Learned, NoPE, RoPE, Sinusoidal, T5Bias

__all__ = [
    "ALiBi",
    "Count",
    "Distance",
    "FeatureSpec",
    "Finite",
    "Learned",
    "Mask",
    "NoPE",
    "ParamSpec",
    "PositionScheme",
    "Positive",
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

_HOMES = {
    "attn.caches": ("cache_needs",),
    "attn.features": ("features",),
    "attn.masks": ("Mask", "causal", "window"),
    "attn.reference": ("attention",),
    "apply.bias": ("bias",),
    "apply.embed": ("embedding",),
    "apply.transform": ("rotary", "transform"),
    "contract.params": ("init_params",),
    "contract.fields": ("Count", "Distance", "Finite", "Positive"),
    "contract.protocol": ("FeatureSpec", "ParamSpec", "PositionScheme", "SchemeWarning"),
    "makers": ("catalogue", "make"),
    "schemes": ("ALiBi", "Learned", "NoPE", "RoPE", "Sinusoidal", "T5Bias"),
    "contract.tokens": ("Rotary", "Tokens"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = (
    "angles",
    "hf",
    "layers",
    "positions",
    "presets",
    "schemes",
    "study",
    "testing",
    "weights",
)

if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> Any:
        """A public name, or a module, imported when it is asked for: ``posenc.RoPE``."""
        if name in _HOME_OF:
            found = globals()[name] = getattr(_import(_HOME_OF[name]), name)
            return found
        if not name.startswith("_"):
            try:
                return _import(name)
            except ModuleNotFoundError as error:
                if error.name != f"posenc.{name}":
                    raise
        raise AttributeError(f"module 'posenc' has no attribute {name!r}{_place(name)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _import(module: str) -> Any:
    return import_module(f"posenc.{module}")


def _place(name: str) -> str:
    """Where a name that is not here is, for an error."""
    if name.startswith("_"):  # asked by tools of every module
        return ""
    if name in _import("schemes").__all__:
        return f"; it is posenc.schemes.{name}"
    hint: str = _import("contract.checks").nearest(name, [*__all__, *_MODULES])
    return hint
