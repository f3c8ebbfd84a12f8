"""Models of one's own in PyTorch, which studies import by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from posenc.layers import LayerPlan
from posenc.schemes import NoPE
from posenc.study.decoder import NORM_EPSILON, Decoder, embedding_scale


def weights_of(recipe, seed):
    """Those of posenc's decoder."""
    plan = LayerPlan.of(NoPE(), recipe.layers)
    return Decoder.of(replace(recipe, model=""), plan, seed).weights


class Same(nn.Module):
    """posenc's decoder, written as a model of one's own."""

    def __init__(self, recipe):
        super().__init__()
        self.recipe = recipe
        for name, value in weights_of(recipe, torch.initial_seed()).items():
            setattr(self, name.replace(".", "_"), nn.Parameter(torch.from_numpy(value)))

    def normed(self, x, name):
        return nn.functional.layer_norm(x, x.shape[-1:], getattr(self, name), eps=NORM_EPSILON)

    def forward(self, tokens, bound):
        embed = self.embed
        x = bound.embed(nn.functional.embedding(tokens, embed) * embedding_scale(self.recipe))
        for n, attend in enumerate(bound):
            hidden = self.normed(x, f"{n}_norm1")
            qkv = hidden @ getattr(self, f"{n}_qkv")
            q, k, v = qkv.unflatten(-1, (3, self.recipe.heads, -1)).permute(2, 0, 3, 1, 4)
            out = attend(q, k, v, x=hidden).transpose(1, 2).flatten(2)
            x = x + out @ getattr(self, f"{n}_out")
            up = self.normed(x, f"{n}_norm2") @ getattr(self, f"{n}_up")
            x = x + nn.functional.gelu(up, approximate="tanh") @ getattr(self, f"{n}_down")
        return self.normed(x, "norm") @ (embed.T if self.recipe.of_task.tied else self.head)


class Plain(nn.Module):
    """A small model with dropout, and switches for what one may do wrong."""

    def __init__(self, recipe, **switches):
        super().__init__()
        self.heads, self.switches = recipe.heads, switches
        self.tokens = nn.Embedding(recipe.vocabulary, recipe.dim)
        self.qkv = nn.ModuleList(
            nn.Linear(recipe.dim, 3 * recipe.dim) for _ in range(recipe.layers)
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens, bound):
        x = self.tokens(tokens)
        x = x if self.switches.get("no_embed") else bound.embed(x)
        for n, qkv in enumerate(self.qkv):
            q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            out = v if n == self.switches.get("skip") else bound[n](q, k, v, x=x)
            x = x + self.dropout(out.transpose(1, 2).flatten(2))
        if self.switches.get("peek"):
            x = x + x.mean(1, keepdim=True)
        logits = x @ self.tokens.weight.T
        return logits[..., :-1] if self.switches.get("narrow") else logits


def no_embed(recipe):
    return Plain(recipe, no_embed=True)


def skips(recipe):
    return Plain(recipe, skip=1)


def peeks(recipe):
    return Plain(recipe, peek=True)


def narrow(recipe):
    return Plain(recipe, narrow=True)


def half(recipe):
    return Plain(recipe).bfloat16()


def unseeded(recipe):
    model = Plain(recipe)
    with torch.no_grad():
        model.tokens.weight += torch.from_numpy(np.random.default_rng().random(1))
    return model


def no_module(recipe):
    return {"init": 1}


not_callable = 3
