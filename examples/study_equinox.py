"""A study of an Equinox model of one's own.

20 steps say little; a comparison: ``posenc compare --model study_equinox:adapt --backend jax``.
"""

import tempfile
from types import SimpleNamespace

import equinox as eqx
import jax
from jax import nn, vmap

from posenc.study import Study, run_study, write_results


class Block(eqx.Module):
    """Pre-norm attention and MLP of hidden states ``(N, T, dim)``."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp: eqx.nn.MLP

    def __init__(self, dim, key):
        keys = jax.random.split(key, 3)
        self.qkv = eqx.nn.Linear(dim, 3 * dim, key=keys[0])
        self.out = eqx.nn.Linear(dim, dim, key=keys[1])
        self.mlp = eqx.nn.MLP(dim, dim, 4 * dim, depth=1, activation=nn.gelu, key=keys[2])

    def __call__(self, x, attend, heads):
        qkv = vmap(vmap(self.qkv))(hidden := nn.standardize(x)).reshape(*x.shape[:2], 3, heads, -1)
        out = attend(*(qkv[:, :, n] for n in range(3)), x=hidden)  # scheme, window, causal mask
        x = x + vmap(vmap(self.out))(out.reshape(x.shape))
        return x + vmap(vmap(self.mlp))(nn.standardize(x))


def adapt(recipe):
    """What a study calls: params of a seed, and logits of params."""

    def made(seed):
        first, *keys = jax.random.split(jax.random.key(seed), 1 + recipe.layers)
        embed = eqx.nn.Embedding(recipe.vocabulary, recipe.dim, key=first)
        return eqx.partition((embed, [Block(recipe.dim, key) for key in keys]), eqx.is_array)

    def apply(params, tokens, bound):
        embed, blocks = eqx.combine(params, rest)
        x = bound.embed(embed.weight[tokens])  # adds sinusoids, or a learned table
        for block, attend in zip(blocks, bound, strict=True):
            x = block(x, attend, recipe.heads)
        return nn.standardize(x) @ embed.weight.T * recipe.dim**-0.5

    rest = made(0)[1]
    return SimpleNamespace(init=lambda seed: made(seed)[0], apply=apply)


if __name__ == "__main__":  # worker processes import this file
    small = {"train_len": 32, "eval_lens": (32, 64), "steps": 20, "layers": 1, "seeds": 1}
    with tempfile.TemporaryDirectory() as out:
        study = Study(model=adapt, schemes=("rope", "alibi"), backend="jax", out=out, **small)
        print(write_results(study, list(run_study(study, study.corpus()))))
