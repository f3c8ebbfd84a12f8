"""A static cache of keys and values: prompts of different lengths, one compiled step, most schemes.

Slot ``p`` of the cache holds the token at position ``p``. Attention is causal, so a query at
position ``p`` sees slots ``0 .. p``. Slots that were never written, or that hold the padding of a
prompt, need no extra mask. Prefill and decoding are one function of tokens and positions.

A scheme that reads hidden states (FoX), or has regions (ReRoPE), needs another cache than that of
transformed keys: ``posenc.cache_needs`` names what it holds.
"""

import warnings

import torch
from torch import nn

import posenc
import posenc_torch

HEADS, DIM, SLOTS, STEPS = 4, 16, 64, 10
PROMPTS = [torch.arange(7), torch.arange(20, 23), torch.arange(40, 52)]


class Decoder(nn.Module):
    """Token embedding, one attention layer, logits."""

    def __init__(self, scheme):
        super().__init__()
        self.tokens = nn.Embedding(64, HEADS * DIM)
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.logits = nn.Linear(HEADS * DIM, 64)
        self.positions = posenc_torch.Positions(scheme, layers=1)

    def forward(self, tokens, pos, cache=None):
        """Logits ``(B, L, 64)`` of tokens at positions ``pos``, both ``(B, L)``."""
        queries = keys = posenc.Tokens(pos)
        if cache is not None:
            keys = posenc.Tokens(torch.arange(SLOTS, device=pos.device))
        bound = self.positions.bind(keys, queries, causal=True, implementation="sdpa")
        x = bound.embed(self.tokens(tokens))
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            # Keys are transformed once, when they are written: their positions do not change.
            rows, new = torch.arange(len(pos))[:, None], (bound[0].transform_keys(k), v)
            for memory, vectors in zip(cache, new, strict=True):
                memory[rows, :, pos] = vectors.transpose(1, 2)
            k, v = cache
        out = bound[0](q, k, v, k_transformed=cache is not None)
        return self.logits(x + out.transpose(1, 2).flatten(2))


@torch.no_grad()
def generate(model, prompts, steps):
    """Greedy decoding: the next tokens of every prompt, and their logits."""
    # Zeros, because uninitialised memory may hold NaN, and a weight of 0 times NaN is NaN.
    cache = torch.zeros(2, len(prompts), HEADS, SLOTS, DIM)
    lengths = torch.tensor([len(p) for p in prompts])
    padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    logits = model(padded, torch.arange(padded.shape[1]).expand(padded.shape), cache)
    found = [logits[torch.arange(len(prompts)), lengths - 1][:, None]]
    step = torch.compile(model, fullgraph=True, backend="eager")
    for n in range(steps):
        found.append(step(found[-1].argmax(-1), lengths[:, None] + n, cache))
    logits = torch.cat(found, dim=1)
    return logits.argmax(-1), logits


if __name__ == "__main__":
    # Dynamo traces cached look-ups of array_api_compat and warns; the result is the same.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    for scheme in (posenc.ALiBi(HEADS), posenc.RoPE(DIM)):
        torch.manual_seed(0)
        model = Decoder(scheme)
        answers, logits = generate(model, PROMPTS, STEPS)
        for prompt, answer, one in zip(PROMPTS, answers, logits, strict=True):
            tokens = torch.cat([prompt, answer])[None]
            whole = model(tokens, torch.arange(tokens.shape[1])[None])[0, len(prompt) - 1 : -1]
            same = torch.allclose(one, whole, atol=1e-5)
            print(f"{scheme}, prompt of {len(prompt):2}: equal without a cache: {same}")
