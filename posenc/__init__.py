"""posenc: positional encodings, written once, compared everywhere.

A scheme is written against the Python Array API. From that one definition come its bias, rotation
or embedding on NumPy, PyTorch and JAX, attention with it, and a study that compares it with others.
"""

from posenc.attn.caches import cache_needs
from posenc.attn.features import features
from posenc.attn.reference import attention
from posenc.evaluate import bias, embedding, transform
from posenc.params import init_params
from posenc.protocol import ParamSpec, PositionScheme, SchemeWarning
from posenc.schemes import ALiBi, Learned, NoPE, RoPE, Sinusoidal, T5Bias, catalogue, make

__all__ = [
    "ALiBi",
    "Learned",
    "NoPE",
    "ParamSpec",
    "PositionScheme",
    "RoPE",
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
    "transform",
]
__version__ = "0.1.0"
