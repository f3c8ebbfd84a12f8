"""Forget gates (FoX): a bias that each token decides from its own hidden state."""

import torch

import posenc
import posenc_torch
from posenc.schemes import FoX

B, L, H, D = 2, 30, 4, 16
torch.manual_seed(0)
x = torch.randn(B, L, H * D)  # hidden states
qkv = torch.nn.Linear(H * D, 3 * H * D)
fox = posenc_torch.Position(FoX(num_heads=H, hidden_dim=H * D))
q, k, v = qkv(x).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
out = fox.attend(q, k, v, causal=True, tokens=posenc.Tokens(x=x))
out.square().mean().backward()
print("out:", tuple(out.shape))
print("gradients:", {name: f"{p.grad.norm():.1e}" for name, p in fox.named_parameters()})

# Decoding: a cache keeps each token's gate instead of its hidden state.
print("a cache must hold:", posenc.cache_needs(fox.scheme))
