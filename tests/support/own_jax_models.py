"""Models of one's own in JAX, which studies import by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from posenc.layers import LayerPlan
from posenc.schemes import NoPE
from posenc.study.decoder import NORM_EPSILON, Decoder, embedding_scale


def norm(x, gain):
    return jax.nn.standardize(x, epsilon=NORM_EPSILON) * gain


def same(recipe):
    """posenc's decoder, written as a model of one's own, with its params in nested lists."""

    def init(seed):
        plan = LayerPlan.of(NoPE(), recipe.layers)
        flat = Decoder.of(replace(recipe, model=""), plan, seed).weights
        names = "qkv", "out", "up", "down", "norm1", "norm2"
        blocks = [{name: flat[f"{n}.{name}"] for name in names} for n in range(recipe.layers)]
        return flat["embed"], blocks, flat["norm"], flat.get("head")

    def apply(params, tokens, bound):
        embed, blocks, gain, head = params
        x = bound.embed(embed[tokens] * embedding_scale(recipe))
        for w, attend in zip(blocks, bound, strict=True):
            hidden = norm(x, w["norm1"])
            qkv = (hidden @ w["qkv"]).reshape(*x.shape[:2], 3, recipe.heads, -1)
            out = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], x=hidden)
            x = x + out.reshape(x.shape) @ w["out"]
            x = x + jax.nn.gelu(norm(x, w["norm2"]) @ w["up"]) @ w["down"]
        return norm(x, gain) @ (embed.T if head is None else head)

    return SimpleNamespace(init=init, apply=apply)


def without_apply(recipe):
    return SimpleNamespace(init=lambda seed: {})


def integers(recipe):
    return SimpleNamespace(init=lambda seed: {"steps": jnp.zeros(3, int)}, apply=lambda *_: None)


def drawn_anew(recipe):
    return SimpleNamespace(
        init=lambda seed: {"w": np.random.default_rng().random(3, np.float32)},
        apply=lambda *_: None,
    )
