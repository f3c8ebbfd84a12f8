"""Endless generation with a bounded cache: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).

The cache holds the first ``SINKS`` tokens and the last ``WINDOW``. The position of a key is its
rank in the cache, not in the text. So positions stay below ``SINKS + WINDOW``, however long the
text is, and no distance is longer than in training. Keys are kept before their rotation, because
their positions change with every step.
"""

import numpy as np

import posenc

SINKS, WINDOW, STEPS = 4, 28, 320
HEADS, DIM, WORDS = 4, 16, 64
SLOTS = SINKS + WINDOW
rng = np.random.default_rng(0)
embed = rng.standard_normal((WORDS, HEADS * DIM), np.float32)
qkv = rng.standard_normal((3, HEADS * DIM, HEADS, DIM), np.float32) / np.sqrt(HEADS * DIM)


def heads(tokens):
    """Queries, keys and values ``(1, HEADS, L, DIM)`` of tokens."""
    return np.einsum("lc,nchd->nhld", embed[tokens], qkv)[:, None]


def attend(scheme, q, cache, step):
    """Attention of the token at ``step`` to the cache, whose slots are not in order of age."""
    slots = np.arange(min(step + 1, SLOTS))
    oldest = max(step + 1 - SLOTS, 0) % WINDOW  # of the slots after the first tokens
    pos = np.where(slots < SINKS, slots, SINKS + (slots - SINKS - oldest) % WINDOW)
    k, v = cache[:, :, :, slots]
    tokens, queries = posenc.Tokens(pos), posenc.Tokens(slots[-1:])
    return posenc.attention(q, k, v, scheme, causal=True, tokens=tokens, queries=queries)


def by_definition(scheme, history):
    """The same from the whole text: the kept tokens, as if they were all that there is."""
    kept = history[:SINKS] + history[SINKS:][-WINDOW:]
    q, k, v = heads(kept)
    return posenc.attention(q[:, :, -1:], k, v, scheme, causal=True)


def generate(scheme):
    """``STEPS`` tokens, drawn one by one; every step equals the definition."""
    cache, text = np.zeros((2, 1, HEADS, SLOTS, DIM), np.float32), [0]
    for step in range(STEPS):
        q, *new = heads(text[-1:])
        slot = step if step < SLOTS else SINKS + (step - SINKS) % WINDOW
        cache[..., slot : slot + 1, :] = new
        out = attend(scheme, q, cache, step)
        np.testing.assert_allclose(out, by_definition(scheme, text), atol=1e-5)
        logits = embed @ (embed[text[-1]] + out.reshape(-1)) / HEADS / DIM
        text.append(int(np.argmax(logits + rng.gumbel(size=WORDS))))
    return text


def main():
    for scheme in (posenc.RoPE(DIM), posenc.ALiBi(HEADS)):
        print(f"{scheme}: {len(generate(scheme)) - 1} tokens from a cache of {SLOTS}")


if __name__ == "__main__":
    main()
