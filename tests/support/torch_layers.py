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

    def forward(self, q, k, v, x, pos=None, seg=None, q_pos=None, q_seg=None):
        """Positions and segments of the keys, and of the queries if they are other tokens."""
        tokens = posenc.Tokens(pos=pos, seg=seg, x=x)
        same = q_pos is None and q_seg is None
        queries = None if same else posenc.Tokens(pos=q_pos, seg=q_seg)
        embedded = self.position.embed(x, pos)
        out = self.position.attend(
            q, k, v, causal=True, tokens=tokens, queries=queries, **self.options
        )
        return out, embedded


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
