"""FlexAttention by hand: a scheme's ``score_mod`` and ``block_mask`` in a call of your own.

``posenc_torch.attention(..., implementation="flex")`` does this, and skips blocks without weight.
On a CPU this runs the definition of FlexAttention; on a GPU compile ``flex_attention``.
"""

import warnings

import torch
from torch.nn.attention.flex_attention import flex_attention

import posenc
import posenc_torch

q, k, v = torch.randn(3, 1, 4, 256, 16).unbind()
alibi = posenc.ALiBi(num_heads=4)
mod = posenc_torch.score_mod(alibi)
mask = posenc_torch.block_mask(256, 256, causal=True, window=100)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is not compiled
    by_hand = flex_attention(q, k, v, score_mod=mod, block_mask=mask)
expected = posenc_torch.attention(q, k, v, alibi, causal=True, window=100)
print("largest difference:", f"{(by_hand - expected).abs().max():.1e}")
