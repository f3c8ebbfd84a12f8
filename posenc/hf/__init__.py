"""Configurations of Hugging Face transformers 4 and 5, read without importing it.

``read`` says what a configuration holds of RoPE, ``from_hf`` gives the scheme and refuses unknown
keys, ``to_hf`` gives the dictionary of a scheme, and ``from_hf_config`` the plan of all layers.
``docs/rope.md`` lists the dialects. ``FAMILIES`` says what a ``model_type`` means beyond its keys:
a model is added there, in one entry.
"""

from posenc.hf.config import Reading, from_hf, read
from posenc.hf.families import FAMILIES
from posenc.hf.mrope import mrope_from_hf
from posenc.hf.parameters import to_hf
from posenc.hf.plan import from_hf_config

__all__ = ["FAMILIES", "Reading", "from_hf", "from_hf_config", "mrope_from_hf", "read", "to_hf"]
