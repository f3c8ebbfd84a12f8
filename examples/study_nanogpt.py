"""A study of a PyTorch model of one's own, in the manner of nanoGPT.

posenc draws the batches, trains and scores; the model gets a pass over the study's schemes.
20 steps say little. A comparison, in this folder:
``posenc compare --model study_nanogpt:GPT --backend torch``.
"""

import tempfile

import torch
from torch import nn

from posenc.study import Study, run_study, write_results


class Block(nn.Module):
    """Pre-norm attention and MLP; ``forward`` receives the layer's attention."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, attend):
        hidden = self.norm1(x)
        q, k, v = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v, x=hidden)  # the layer's scheme, window and causal mask
        x = x + self.dropout(self.out(out.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """``GPT(recipe)``; a function that returns a module does too."""

    def __init__(self, recipe):
        super().__init__()
        self.tokens = nn.Embedding(recipe.vocabulary, recipe.dim)
        self.blocks = nn.ModuleList(Block(recipe.dim, recipe.heads) for _ in range(recipe.layers))
        self.norm = nn.LayerNorm(recipe.dim)
        self.head = nn.Linear(recipe.dim, recipe.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens, bound):
        x = bound.embed(self.tokens(tokens))  # adds sinusoids, or a learned table
        for block, attend in zip(self.blocks, bound, strict=True):
            x = block(x, attend)
        return self.head(self.norm(x))


SMALL = {"train_len": 32, "eval_lens": (32, 128), "steps": 20, "dim": 32, "heads": 4, "seeds": 1}

if __name__ == "__main__":  # worker processes import this file
    with tempfile.TemporaryDirectory() as out:
        study = Study(model=GPT, schemes=("rope", "alibi"), backend="torch", out=out, **SMALL)
        print(write_results(study, list(run_study(study, study.corpus()))))
