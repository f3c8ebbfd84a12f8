"""A study of a Flax NNX model of one's own.

20 steps say little; a comparison: ``posenc compare --model study_flax:adapt --backend jax``.
"""

import tempfile
from types import SimpleNamespace

from flax import nnx

from posenc.study import Study, run_study, write_results


class Block(nnx.Module):
    """Pre-norm attention and MLP of hidden states ``(N, T, dim)``."""

    def __init__(self, dim, heads, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.qkv = nnx.LinearGeneral(dim, (3, heads, dim // heads), rngs=rngs)
        self.out = nnx.Linear(dim, dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x, attend):
        qkv = self.qkv(hidden := self.norm1(x))
        out = attend(*(qkv[:, :, n] for n in range(3)), x=hidden)  # scheme, window, causal mask
        x = x + self.out(out.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Model(nnx.Module):
    """Logits ``(N, T, V)``."""

    def __init__(self, recipe, rngs):
        self.tokens = nnx.Embed(recipe.vocabulary, recipe.dim, rngs=rngs)
        blocks = [Block(recipe.dim, recipe.heads, rngs) for _ in range(recipe.layers)]
        self.blocks, self.norm = nnx.List(blocks), nnx.LayerNorm(recipe.dim, rngs=rngs)

    def __call__(self, tokens, bound):
        x = bound.embed(self.tokens(tokens))  # adds sinusoids, or a learned table
        for block, attend in zip(self.blocks, bound, strict=True):
            x = block(x, attend)
        return self.tokens.attend(self.norm(x))


def adapt(recipe):
    """What a study calls: params of a seed, and logits of params."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Model(recipe, nnx.Rngs(0))))
    return SimpleNamespace(
        init=lambda seed: nnx.state(Model(recipe, nnx.Rngs(seed)), nnx.Param),
        apply=lambda params, tokens, bound: nnx.merge(graph, params)(tokens, bound),
    )


if __name__ == "__main__":  # worker processes import this file
    small = {"train_len": 32, "eval_lens": (32, 64), "steps": 20, "layers": 1, "seeds": 1}
    with tempfile.TemporaryDirectory() as out:
        study = Study(model=adapt, schemes=("rope", "alibi"), backend="jax", out=out, **small)
        print(write_results(study, list(run_study(study, study.corpus()))))
