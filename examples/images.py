"""Places of images: axial RoPE in an image model, M-RoPE where text and images are mixed.

Wang et al. 2024, "Qwen2-VL", arXiv 2409.12191; Heo et al. 2024, arXiv 2403.13298.
"""

import torch

import posenc_torch
from posenc import Tokens
from posenc.positions import Patches, grid, mixed, text_places
from posenc.schemes import AxialRoPE, MRoPE

torch.manual_seed(0)


def vectors(length):
    return [torch.randn(1, 4, length, 32) for _ in range(3)]  # q, k, v


# An image of 6 x 8 patches, each with a row and a column. Every patch sees every other.
places = torch.tensor(grid(6, 8))
q, k, v = vectors(len(places))
out = posenc_torch.attention(q, k, v, AxialRoPE(32), tokens=Tokens(places=places))
print("image model:", tuple(out.shape))

# Five tokens of text, an image of 3 x 4 tokens, and two of text. Order is that of the sequence.
mrope = MRoPE(32)
sequence, delta = mixed([5, Patches(3, 4), 2])
places = torch.tensor(sequence)
q, k, v = vectors(len(places))
out = posenc_torch.attention(q, k, v, mrope, causal=True, tokens=Tokens(places=places))
print("last token of text at (time, height, width):", sequence[-1].tolist())

# The next token in decoding: its position is its index, and its place adds the sequence's delta.
position = len(sequence)
print("next token at:", text_places([position], delta)[0].tolist())

# Text needs no places: M-RoPE is RoPE there.
q, k, v = vectors(7)
text = posenc_torch.attention(q, k, v, mrope, causal=True)
rope = posenc_torch.attention(q, k, v, mrope.rope, causal=True)
print("text as RoPE:", torch.equal(text, rope))
