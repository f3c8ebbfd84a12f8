"""Weights of checkpoints: positions' learned arrays as ``params``, projections in posenc's layouts.

A function named after a family reads that family's own layout. Arrays may be of NumPy, PyTorch, JAX
or another Array API library, and results are of the same. ``weights`` is a state dict, or an opened
file of safetensors, of which only the arrays in question are loaded.
"""

from posenc.weights.families import bloom, gptj, mpt, opt, t5
from posenc.weights.layouts import half_to_interleaved, interleaved_to_half, split_qkv

__all__ = [
    "bloom", "gptj", "half_to_interleaved", "interleaved_to_half", "mpt", "opt", "split_qkv", "t5",
]  # fmt: skip
