"""posenc: positional encodings, written once, compared everywhere.

A scheme is written against the Python Array API. From that one definition come its bias, rotation
or embedding on NumPy, PyTorch and JAX, attention with it, and a study that compares it with others.
"""

from posenc.attention import attention
from posenc.caches import cache_needs
from posenc.call import prepare
from posenc.evaluate import bias, embedding, transform
from posenc.params import init_params
from posenc.protocol import ParamSpec, PositionScheme, SchemeWarning
from posenc.schemes import ALiBi, Learned, NoPE, RoPE, Sinusoidal, T5Bias, make, schemes
from posenc.token_features import features

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
    "embedding",
    "features",
    "init_params",
    "make",
    "prepare",
    "schemes",
    "transform",
]
__version__ = "0.1.0"
