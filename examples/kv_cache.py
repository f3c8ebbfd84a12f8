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

    def __init__(self, scheme, implementation="sdpa"):
        super().__init__()
        self.implementation = implementation
        self.tokens = nn.Embedding(64, HEADS * DIM)
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.logits = nn.Linear(HEADS * DIM, 64)
        self.positions = posenc_torch.Positions(scheme, layers=1)

    def forward(self, tokens, pos, cache=None):
        """Logits ``(B, L, 64)`` of tokens at positions ``pos``, both ``(B, L)``."""
        queries = keys = posenc.Tokens(pos)
        if cache is not None:
            keys = posenc.Tokens(torch.arange(cache.shape[3], device=pos.device))
        bound = self.positions.bind(keys, queries, True, implementation=self.implementation)
        x = bound.embed(self.tokens(tokens))
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            # Keys are transformed once, when they are written: their positions do not change.
            k, v = write(cache, bound[0].transform_keys(k), v, pos)
        out = bound[0](q, k, v, k_transformed=cache is not None)
        return self.logits(x + out.transpose(1, 2).flatten(2))


def empty_cache(batch):
    # Zeros, because uninitialised memory may hold NaN, and a weight of 0 times NaN is NaN.
    return torch.zeros(2, batch, HEADS, SLOTS, DIM)


def write(cache, k, v, pos):
    """Write keys and values into the slots of their positions, in place; return the cache."""
    rows = torch.arange(len(pos), device=pos.device)[:, None]
    for memory, new in zip(cache, (k, v), strict=True):
        memory[rows, :, pos] = new.transpose(1, 2)
    return cache


class CountingBackend:
    """A backend of torch.compile that counts graphs and runs them unchanged."""

    graphs = 0

    def __call__(self, graph, examples):
        self.graphs += 1
        return graph.forward


@torch.no_grad()
def generate(model, prompts, steps, backend):
    """Greedy decoding: the next tokens of every prompt, and their logits."""
    cache = empty_cache(len(prompts))
    lengths = torch.tensor([len(p) for p in prompts])
    padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    logits = model(padded, torch.arange(padded.shape[1]).expand(padded.shape), cache)
    logits = logits[torch.arange(len(prompts)), lengths - 1][:, None]
    step = torch.compile(model, fullgraph=True, backend=backend)
    all_logits, pos = [logits], lengths[:, None]
    for _ in range(steps):
        logits = step(logits.argmax(-1), pos, cache)
        all_logits.append(logits)
        pos = pos + 1
    logits = torch.cat(all_logits, dim=1)
    return logits.argmax(-1), logits


@torch.no_grad()
def without_cache(model, prompt, answer):
    """The same logits from one call on the whole sequence, without a cache."""
    tokens = torch.cat([prompt, answer])[None]
    return model(tokens, torch.arange(tokens.shape[1])[None])[0, len(prompt) - 1 : -1]


def main():
    # Dynamo traces cached look-ups of array_api_compat and warns; the result is the same.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    for scheme in (posenc.ALiBi(HEADS), posenc.RoPE(DIM)):
        torch.manual_seed(0)
        model, backend = Decoder(scheme), CountingBackend()
        answers, logits = generate(model, PROMPTS, STEPS, backend)
        print(scheme)
        print(f"  compiled {backend.graphs} time in {STEPS} steps")
        for prompt, answer, one in zip(PROMPTS, answers, logits, strict=True):
            whole = without_cache(model, prompt, answer)
            same = torch.allclose(one, whole, atol=1e-5)
            print(f"  prompt of {len(prompt):2}: equal without a cache: {same}")


if __name__ == "__main__":
    main()
