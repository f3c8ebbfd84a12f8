"""Paged attention: sequences share one pool of pages; positions and segments say which is whose.

A slot of the pool has a position in its sequence, and a segment: the sequence that owns it. Both
are written when a page is allocated; attention needs no other page table. A query sees its own
segment up to its own position. It sees neither the pages of other sequences nor free pages. It does
not see what an earlier owner left in a slot that is not yet written.
"""

import torch

import posenc
import posenc_torch

HEADS, KV_HEADS, DIM = 4, 2, 16
PAGE, PAGES, FREE = 128, 8, -1


class Pool:
    """Transformed keys, and values, of many sequences, in pages."""

    def __init__(self, scheme):
        self.scheme = scheme
        self.k, self.v = torch.zeros(2, 1, KV_HEADS, PAGES * PAGE, DIM)
        self.pos = torch.zeros(PAGES * PAGE, dtype=torch.int32)
        self.seg = torch.full((PAGES * PAGE,), FREE)
        self.free = [2, 7, 0, 5, 3, 6, 1, 4]  # allocated from the end; any order works
        self.pages, self.length = {}, {}

    def append(self, owner, k, v):
        """Add keys and values ``(Hk, L, D)`` of the next tokens of a sequence."""
        pages, start = self.pages.setdefault(owner, []), self.length.get(owner, 0)
        self.length[owner] = end = start + k.shape[1]
        while len(pages) * PAGE < end:
            slots = slots_of(self.free[-1])
            self.pos[slots] = len(pages) * PAGE + torch.arange(PAGE, dtype=torch.int32)
            self.seg[slots] = owner
            pages.append(self.free.pop())
        pos = torch.arange(start, end)
        slots = torch.tensor(pages)[pos // PAGE] * PAGE + pos % PAGE
        self.k[0, :, slots] = posenc.transform(self.scheme, k, pos, role="key")
        self.v[0, :, slots] = v

    def release(self, owner):
        """Free all pages of a sequence; their contents stay."""
        for page in self.pages.pop(owner):
            self.seg[slots_of(page)] = FREE
            self.free.append(page)
        del self.length[owner]

    def sides(self, owners):
        """The tokens of the pool, and those of the queries: the last one of each sequence."""
        last = torch.tensor([[self.length[owner] - 1] for owner in owners])
        own = torch.tensor(owners)[:, None]
        tokens, queries = posenc.Tokens(self.pos, self.seg), posenc.Tokens(last, own)
        return {"tokens": tokens, "queries": queries}

    def attend(self, q, sides):
        """Attention of one query per sequence, ``(B, H, 1, D)``, in one call."""
        k, v = (a.expand(len(q), -1, -1, -1) for a in (self.k, self.v))  # a view, not a copy
        options = {"causal": True, "k_transformed": True}
        return posenc_torch.attention(q, k, v, self.scheme, **options, **sides)


def slots_of(page):
    return slice(page * PAGE, (page + 1) * PAGE)


def extend(pool, texts, owner, length):
    """Draw more keys and values of a sequence; add them to the pool and to ``texts``."""
    new = torch.randn(2, KV_HEADS, length, DIM)
    pool.append(owner, *new)
    texts[owner] = torch.cat([texts[owner], new], dim=2) if owner in texts else new


def show(pool, texts, sides=None):
    """Compare attention of every sequence's last token in the pool and on its own."""
    sides = sides or pool.sides(list(texts))
    q = torch.randn(len(texts), HEADS, 1, DIM)
    out = pool.attend(q, sides)
    blocks = posenc_torch.block_mask(1, PAGES * PAGE, causal=True, **sides).kv_num_blocks
    for row, (owner, (k, v)) in enumerate(texts.items()):
        one = q[row : row + 1], k[None], v[None]
        alone = posenc_torch.attention(*one, pool.scheme, causal=True)
        print(
            f"  {k.shape[1]:3} tokens in pages {pool.pages[owner]!s:12} "
            f"equal to the sequence alone: {torch.allclose(out[row], alone[0], atol=1e-5)}; "
            f"blocks that FlexAttention reads: {int(blocks[row])} of {PAGES}"
        )


def main():
    for scheme in (posenc.ALiBi(HEADS), posenc.RoPE(DIM)):
        torch.manual_seed(0)
        print(scheme)
        pool, texts = Pool(scheme), {}
        for owner, length in enumerate([300, 100, 200]):
            extend(pool, texts, owner, length)
        show(pool, texts)

        print("  one sequence ends, another takes its page, the first needs one more page")
        pool.release(1)
        del texts[1]
        extend(pool, texts, 3, 250)
        for _ in range(90):
            extend(pool, texts, 0, 1)
        show(pool, texts)

    print("a prefix that two sequences share is stored once")
    pool, texts = Pool(scheme), {}
    extend(pool, texts, 0, PAGE)
    pool.pages[1], pool.length[1], texts[1] = pool.pages[0][:], PAGE, texts[0]
    extend(pool, texts, 0, 50)
    extend(pool, texts, 1, 20)
    # Slots with two owners: segments per sequence, (B, pool) instead of (pool,).
    sides = pool.sides([0, 1])
    seg = pool.seg.repeat(2, 1)
    seg[1, slots_of(pool.pages[1][0])] = 1
    sides["tokens"] = posenc.Tokens(pool.pos, seg)
    show(pool, texts, sides)


if __name__ == "__main__":
    main()
