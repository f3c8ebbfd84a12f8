"""A mask of one's own with ``blocks`` skips what it hides, wherever blocks are skipped."""

from dataclasses import dataclass

import numpy as np
import pytest

import posenc
from posenc import Mask
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare

torch, jax = (pytest.importorskip(name) for name in ("torch", "jax"))
LENGTH, SIZE, DOCUMENT = 64, 8, 16


@dataclass(frozen=True)
class Documents(Mask):
    """A query sees its own document of ``size`` tokens; nothing is known of blocks."""

    size: int

    def pairs(self, q, k, xp):
        return q.pos // self.size == k.pos // self.size


@dataclass(frozen=True)
class Known(Documents):
    """The same mask, which tells its blocks."""

    def blocks(self, q, k):
        first, last = q.low // self.size, q.high // self.size
        some = (first <= k.high // self.size) & (k.low // self.size <= last)
        return some, (first == k.high // self.size) & (k.low // self.size == last)


def torch_chunked(mask):
    from posenc_torch.chunked.parts import parts, small_blocks

    x = torch.ones(1, 2, LENGTH, 8)
    call = prepare(x, x, x, posenc.ALiBi(2), given=Arguments(mask=mask), skip_blocks=False)
    with small_blocks(SIZE):
        return sum((p.queries.stop - p.queries.start) * sum(p.key_counts) for p in parts(call))


def torch_flex(mask):
    from posenc_torch import block_mask

    size = 128
    wide = type(mask)(mask.size * size // SIZE)
    made = block_mask(LENGTH * size // SIZE, LENGTH * size // SIZE, mask=wide)
    return int(made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum())


def jax_chunked(mask):
    import jax.numpy as jnp

    from posenc_jax.chunked.blocks import block_size, make_tiling
    from posenc_jax.chunked.ranges import visible_ranges

    x = jnp.ones((1, 2, LENGTH, 8))
    given = Arguments(mask=mask)
    call = prepare(x, x, x, posenc.ALiBi(2), given=given, skip_blocks=False)
    with block_size(SIZE):
        first, end = visible_ranges(make_tiling(call), call.query, call.key).keys
    return int((end - first).sum())


def jax_ring(mask):
    import jax.numpy as jnp

    from posenc_jax.chunked import implementation as chunked
    from posenc_jax.ring.exchange import Ring

    x = jnp.ones((1, 2, LENGTH, 8))
    call = prepare(x, x, x, posenc.ALiBi(2), given=Arguments(mask=mask))
    ring = Ring(chunked, call, True, "axis", 4)
    sides = [call.query.select(slice(n, n + DOCUMENT)) for n in range(0, LENGTH, DOCUMENT)]
    pairs = [pair for q in sides for k in sides for pair in ring.block_pairs(q, k)]
    return sum(bool(any_visible) for *_, any_visible in pairs)


@pytest.mark.parametrize("count", [torch_chunked, torch_flex, jax_chunked, jax_ring])
def test_a_mask_with_blocks_skips(count):
    """Only the blocks on the diagonal of documents are left: a quarter of four documents."""
    whole, known = count(Documents(DOCUMENT)), count(Known(DOCUMENT))
    assert known * (LENGTH // DOCUMENT) == whole


def test_results_are_those_without_blocks():
    q, k, v = (np.random.default_rng(n).standard_normal((1, 2, LENGTH, 8)) for n in range(3))
    masks = Documents(DOCUMENT), Known(DOCUMENT) & posenc.causal
    for mask, causal in zip(masks, (False, True), strict=True):
        expected = posenc.attention(q, k, v, posenc.RoPE(8), causal=causal, mask=masks[0])
        found = posenc.attention(q, k, v, posenc.RoPE(8), mask=mask)
        np.testing.assert_array_equal(found, expected)
