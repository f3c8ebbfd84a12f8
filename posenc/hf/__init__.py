"""RoPE from configurations of Hugging Face transformers 4 and 5, and back, without importing it.

``read`` says what a configuration holds, ``from_hf`` gives the scheme and refuses unknown keys,
and ``to_hf`` gives the dictionary of a scheme. ``docs/rope.md`` lists the dialects.
"""

from posenc.hf.config import Reading, from_hf, read
from posenc.hf.mrope import mrope_from_hf
from posenc.hf.parameters import to_hf

__all__ = ["Reading", "from_hf", "mrope_from_hf", "read", "to_hf"]
