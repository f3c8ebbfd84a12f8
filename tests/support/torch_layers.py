"""A layer that uses a scheme as a model does, and what it takes."""

from __future__ import annotations

import numpy as np
import torch
from subjects import heads, normal
from torch import nn

import posenc
import posenc_torch
from posenc.testing.examples import HEAD_DIM, HIDDEN_DIM


class Layer(nn.Module):
    """Both places where a model meets a scheme: hidden states and attention."""

    def __init__(self, scheme, *, device=None, dtype=torch.float32, **options):
        super().__init__()
        self.position = posenc_torch.Position(scheme, device=device, dtype=dtype)
        self.options = options

    def forward(self, q, k, v, x, q_pos=None, k_pos=None, q_seg=None, k_seg=None):
        at = {"q_pos": q_pos, "k_pos": k_pos, "q_seg": q_seg, "k_seg": k_seg}
        embedded = self.position.embed(x, k_pos)
        return self.position.attend(q, k, v, x=x, causal=True, **at, **self.options), embedded


def tensors(scheme, q_len, k_len, batch=2, dtype=torch.float32):
    """Queries, keys, values and hidden states."""
    width = embedding_width(scheme) or HIDDEN_DIM
    shapes = {
        "q": (batch, heads(scheme), q_len, HEAD_DIM),
        "k": (batch, heads(scheme), k_len, HEAD_DIM),
    }
    shapes |= {"v": shapes["k"], "x": (batch, k_len, width)}
    return {
        name: torch.tensor(normal(shape, seed), dtype=dtype)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def embedding_width(scheme):
    """Channels of a scheme's embedding; None if it has none."""
    found = posenc.embedding(scheme, np.asarray([0]), posenc.init_params(scheme))
    return None if found is None else found.shape[-1]
