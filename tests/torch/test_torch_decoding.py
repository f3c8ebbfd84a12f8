"""Decoding in PyTorch: in caches, pools and ragged batches each sequence is as if alone.

The library has no code for them: positions and segments alone decide the mask. Masked slots hold
junk here, so that a read of one would change a result.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from cases import ONE_OF_EACH
from frameworks import PARTIAL
from frameworks_installed import require
from sample import exhaustive, long, some
from subjects import SUBJECTS

import posenc
from posenc.testing import SchemeCase, assert_near, frameworks
from posenc.testing.tolerances import ATTENTION_TOL

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch.nn.attention.flex_attention import flex_attention

import posenc_torch
from posenc_torch.flex import programs

FLOAT32 = ATTENTION_TOL["float32"]  # for sums of up to 20 keys, as here
TORCH = frameworks()["torch"]
PROMPTS, STEPS, SLOTS = (7, 1, 12), 2, 20
BATCH, LONGEST = len(PROMPTS), max(PROMPTS) + 10
JUNK = 100.0  # finite: a weight of 0 times NaN is NaN
NOBODY = -1
IMPLEMENTATIONS = [p for p in posenc_torch.IMPLEMENTATIONS if p not in ("reference", *PARTIAL)]
# A table; sums and a carry; a transform beside a bias; a table of each key.
SOME = ["t5", "fox", "both", "rope+key-side"]


def on_every_implementation(names):
    """Every name; by FlexAttention, a second for each, one of them in the quick part."""
    grid = [(n, implementation) for implementation in IMPLEMENTATIONS for n in names]
    one = ("rope+key-side", "flex") if names is ONE_OF_EACH else None
    quick = [at for at in grid if at[1] != "flex" or at == one]
    return pytest.mark.parametrize(("name", "implementation"), some(grid, quick, long))


class Texts:
    """Independent sequences of one batch; they may begin with the same tokens."""

    def __init__(self, name, longest=LONGEST, alike=0):
        self.subject = SchemeCase(SUBJECTS[name])
        self.scheme = self.subject.scheme
        self.needs = posenc.cache_needs(self.scheme)
        drawn = self.subject.tensors(longest, batch=BATCH, grouped=True)
        self.wide = {name: np.array(a) for name, a in drawn.items()}
        for a in self.wide.values():
            a[..., :alike, :] = a[:1, ..., :alike, :]
        self.arrays = {n: torch.tensor(a, dtype=torch.float32) for n, a in self.wide.items()}
        self.params = {n: torch.tensor(a) for n, a in self.subject.params.items()}

    def tokens(self, row, pos):
        """q, k, v and x of the tokens ``pos (L,)`` of one sequence, with a batch of one."""
        return {name: a[row : row + 1][..., pos, :] for name, a in self.arrays.items()}

    def step(self, pos):
        """Likewise for all sequences, at positions ``(B, L)``."""
        rows = [self.tokens(row, own) for row, own in enumerate(pos)]
        return {name: torch.cat([row[name] for row in rows]) for name in self.arrays}

    def features(self, tokens, pos=None, carry=None):
        """Features of tokens as queries and as keys; None if a cache needs none."""
        if not self.needs.features:
            return None
        given, carry = {name: tokens[name] for name in "qk"}, carry or None
        if carry is not None and self.needs.x_before:
            at = pos[:, :1] + torch.arange(-self.needs.x_before, 0)
            x = self.arrays["x"]
            given["x_before"] = torch.stack(
                [x[row, own.clamp(min=0)] * (own >= 0)[:, None] for row, own in enumerate(at)]
            )
        where = posenc.Tokens(pos=pos, x=tokens["x"])
        both = posenc.features(self.scheme, self.params, where, **given, carry=carry)
        return tuple(side.features for side in both)

    def cached_keys(self, k, pos, features):
        """Keys as a cache holds them: transformed, maybe with more channels, or raw."""
        if not self.needs.transformed:
            return k
        given = {"params": self.params, "features": {} if features is None else features[1]}
        return posenc.transform(self.scheme, k, pos, role="key", **given)

    def last_sums(self, features, at):
        """The carry from the tokens ``at (B,)``; None without one."""
        if features is None:
            return None
        rows = torch.arange(len(at))
        return {name: features[1][name][rows, :, at] for name in self.needs.carry}

    @cache  # noqa: B019 as long as the texts themselves
    def alone(self, row, window=None):
        """The reference of a whole sequence in float64: ``(H, L, D)``."""
        q, k, v, x = (self.wide[name][row : row + 1] for name in "qkvx")
        given = self.scheme, self.subject.params, True
        tokens = posenc.Tokens(x=x)
        return posenc.attention(q, k, v, *given, tokens=tokens, window=window)[0]

    def check(self, result, row, pos, window=None):
        expected = self.alone(row, window)[:, np.asarray(pos)]
        assert_near(result.numpy(), expected, FLOAT32, f"sequence {row}")


texts = cache(Texts)


def select_features(features, pos):
    """Features of the tokens ``pos (B, L)`` of each sequence."""
    if features is None:
        return None
    return tuple(
        {
            name: torch.stack([row[:, own] for row, own in zip(array, pos, strict=True)])
            for name, array in side.items()
        }
        for side in features
    )


class Memory:
    """Keys, values and features in slots; empty slots hold junk. Keys may be transformed."""

    def __init__(self, own, batch, slots):
        self.own, first = own, own.tokens(0, torch.arange(1))
        features = own.features(first)
        k = own.cached_keys(first["k"], torch.zeros(1, dtype=torch.int64), features)
        self.k, self.v = (
            torch.full((batch, a.shape[1], slots, a.shape[3]), JUNK) for a in (k, first["v"])
        )
        self.features = {}
        if "features" in own.needs.keep:
            for name, one in features[1].items():
                shape = (batch, own.subject.heads, slots, *one.shape[3:])
                self.features[name] = torch.full(shape, JUNK)

    def write(self, tokens, slots, pos, features):
        """Tokens at positions ``(B, L)`` into slots ``(B, L)``, in place."""
        rows = torch.arange(len(slots))[:, None]
        of_keys = {} if features is None else features[1]
        k = self.own.cached_keys(tokens["k"], pos, features)
        self.k[rows, :, slots] = k.transpose(1, 2)
        self.v[rows, :, slots] = tokens["v"].transpose(1, 2)
        for name, kept in self.features.items():
            kept[rows, :, slots] = of_keys[name].transpose(1, 2)

    def read(self, implementation, q, features, tokens, queries, window=None):
        """Attention of queries to the memory; one memory may serve a batch, without a copy."""
        k, v = (a.expand(len(q), *a.shape[1:]) for a in (self.k, self.v))
        if features is not None:
            kept = {n: a.expand(len(q), *a.shape[1:]) for n, a in self.features.items()}
            tokens, queries = tokens.with_features(kept), queries.with_features(features[0])
        given = {"k_transformed": self.own.needs.transformed, "window": window}
        try:
            return posenc_torch.attention(
                q, k, v, self.own.scheme, self.own.params, True,
                tokens=tokens, queries=queries, implementation=implementation, **given,
            )  # fmt: skip
        except NotImplementedError as reason:
            pytest.skip(f"refused: {reason}")


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def _eagerly():
    with TORCH.precision_scope([]):
        yield


def prefilled(own, slots):
    """A static cache that holds all prompts, its slots their positions, and the last sums.

    The shorter prompts are padded on the right with junk, which lands in the cache.
    """
    memory, lengths = Memory(own, BATCH, slots), torch.tensor(PROMPTS)
    pos = torch.arange(max(PROMPTS)).expand(BATCH, -1)
    tokens = own.step(pos)
    for a in tokens.values():
        a.movedim(-2, 1)[pos >= lengths[:, None]] = JUNK
    features = own.features(tokens, pos)
    memory.write(tokens, pos, pos, features)
    return memory, tokens["q"], pos, features, own.last_sums(features, lengths - 1)


# What is in the cache


@on_every_implementation(ONE_OF_EACH)
@pytest.mark.usefixtures("_eagerly")
def test_a_static_cache(name, implementation):
    own = texts(name)
    memory, q, pos, features, carry = prefilled(own, SLOTS)
    slots = posenc.Tokens(pos=torch.arange(SLOTS))
    result = memory.read(implementation, q, features, slots, posenc.Tokens(pos=pos))
    for row, length in enumerate(PROMPTS):
        own.check(result[row, :, :length], row, range(length))
    for step in range(STEPS):
        pos = torch.tensor(PROMPTS)[:, None] + step
        tokens = own.step(pos)
        features = own.features(tokens, pos, carry)
        memory.write(tokens, pos, pos, features)
        result = memory.read(implementation, tokens["q"], features, slots, posenc.Tokens(pos=pos))
        for row in range(BATCH):
            own.check(result[row], row, pos[row])
        carry = own.last_sums(features, torch.zeros(BATCH, dtype=torch.int64))


@on_every_implementation(SOME)
@pytest.mark.usefixtures("_eagerly")
def test_a_window_needs_as_many_slots_as_it_is_wide(name, implementation):
    own, window = texts(name), 5
    memory = Memory(own, BATCH, window)
    at = torch.zeros(BATCH, window, dtype=torch.int64)
    seg = torch.full((BATCH, window), NOBODY)  # no query carries it
    whole = own.features(own.arrays)

    def write(pos):
        tokens, features = own.step(pos), select_features(whole, pos)
        memory.write(tokens, pos % window, pos, features)
        at.scatter_(1, pos % window, pos)
        seg.scatter_(1, pos % window, 0)
        return tokens["q"], features

    for step in range(1 - window, STEPS):
        # Before its beginning a short prompt has its first token again.
        pos = (torch.tensor(PROMPTS)[:, None] + step).clamp(min=0)
        q, features = write(pos)
        if step < 0:
            continue
        tokens = posenc.Tokens(pos=at, seg=seg)
        queries = posenc.Tokens(pos=pos, seg=torch.zeros_like(pos))
        result = memory.read(implementation, q, features, tokens, queries, window)
        for row in range(BATCH):
            own.check(result[row], row, pos[row], window)
    assert (seg == NOBODY).any()  # the shortest sequence has not filled its slots


# Whose it is


PAGE = 4


class Pool(Memory):
    """One memory for all sequences: pages, the position of each of their slots, and its owner."""

    def __init__(self, own, order, page=PAGE):
        super().__init__(own, 1, len(order) * page)
        self.page, self.free = page, list(order)
        self.pos = torch.zeros(len(order) * page, dtype=torch.int64)
        self.seg = torch.full((len(order) * page,), NOBODY)
        self.pages = {}

    def add(self, owner, row, start, end):
        """Tokens ``start .. end - 1`` of text ``row``, one page at a time."""
        pos, pages = torch.arange(start, end), self.pages.setdefault(owner, [])
        while len(pages) * self.page < end:
            slots = self.slots(self.free[0])
            self.pos[slots] = len(pages) * self.page + torch.arange(self.page)
            self.seg[slots] = owner
            pages.append(self.free.pop(0))
        slots = torch.tensor(pages)[pos // self.page] * self.page + pos % self.page
        text = {name: a[row : row + 1] for name, a in self.own.arrays.items()}
        features = select_features(self.own.features(text), pos[None])
        self.write(self.own.tokens(row, pos), slots[None], pos, features)

    def drop(self, owner):
        for page in self.pages.pop(owner):
            self.seg[self.slots(page)] = NOBODY
            self.free.insert(0, page)

    def slots(self, page):
        return slice(page * self.page, (page + 1) * self.page)


def last(own, ends):
    """The last tokens of every sequence, ``(B, L)``, and their features."""
    pos = torch.tensor(ends)[:, None] - 1
    return own.step(pos)["q"], pos, select_features(own.features(own.arrays), pos)


@on_every_implementation(ONE_OF_EACH)
@pytest.mark.usefixtures("_eagerly")
def test_a_paged_pool(name, implementation):
    a_paged_pool(texts(name), implementation)


def a_paged_pool(own, implementation):
    pool = Pool(own, [5, 2, 7, 0, 6, 3, 8, 1, 4, 9])
    pool.add(9, 1, 0, 15)  # who comes and goes
    for start in range(0, 12, 3):  # in turns, so that pages of both are mixed
        for row in (0, 2):
            pool.add(row, row, start, start + 3)
    pool.drop(9)
    pool.add(1, 1, 0, 6)
    assert set(pool.pages[1]) <= {5, 2, 7, 0}  # what is in them now is another's
    ends = (12, 6, 12)
    q, pos, features = last(own, ends)
    tokens = posenc.Tokens(pos=pool.pos, seg=pool.seg)
    queries = posenc.Tokens(pos=pos, seg=torch.arange(BATCH)[:, None])
    result = pool.read(implementation, q, features, tokens, queries)
    for row in range(BATCH):
        own.check(result[row], row, pos[row])


@on_every_implementation(SOME)
@pytest.mark.usefixtures("_eagerly")
def test_a_page_of_several_sequences(name, implementation):
    own, ends = Texts(name, alike=PAGE), (7, 9, 5)
    pool = Pool(own, [6, 1, 4, 0, 2, 5, 3])
    pool.add(0, 0, 0, PAGE)
    (first,) = pool.pages[0]
    pool.pages |= {1: [first], 2: [first]}
    for row, end in enumerate(ends):
        pool.add(row, row, PAGE, end)
    k_seg = pool.seg.repeat(BATCH, 1)  # each sequence gets its own segments
    k_seg[:, pool.slots(first)] = torch.arange(BATCH)[:, None]
    q, pos, features = last(own, ends)
    tokens = posenc.Tokens(pos=pool.pos, seg=k_seg)
    queries = posenc.Tokens(pos=pos, seg=torch.arange(BATCH)[:, None])
    result = pool.read(implementation, q, features, tokens, queries)
    for row in range(BATCH):
        own.check(result[row], row, pos[row])


@on_every_implementation(SOME)
@pytest.mark.usefixtures("_eagerly")
def test_a_ragged_batch_in_one_row(name, implementation):
    own, ends, counts = texts(name), (9, 3, 6), (1, 3, 4)
    keys = [torch.arange(end) for end in ends]
    late = [pos[-count:] for pos, count in zip(keys, counts, strict=True)]
    memory = Memory(own, 1, sum(ends))
    tokens = [own.tokens(row, pos) for row, pos in enumerate(keys)]
    whole = {name: torch.cat([t[name] for t in tokens], dim=-2) for name in tokens[0]}
    features = own.features(own.arrays)
    if features is not None:
        features = [
            {
                name: torch.cat([a[row : row + 1, :, pos] for row, pos in enumerate(at)], dim=2)
                for name, a in side.items()
            }
            for side, at in zip(features, (late, keys), strict=True)
        ]
    k_pos, q_pos = torch.cat(keys), torch.cat(late)
    memory.write(whole, torch.arange(sum(ends))[None], k_pos, features)
    q = torch.cat([own.tokens(row, pos)["q"] for row, pos in enumerate(late)], dim=2)
    q_seg, k_seg = (
        torch.arange(BATCH).repeat_interleave(torch.tensor(sizes)) for sizes in (counts, ends)
    )
    keys, queries = posenc.Tokens(pos=k_pos, seg=k_seg), posenc.Tokens(pos=q_pos, seg=q_seg)
    result = memory.read(implementation, q, features, keys, queries)
    for row, part in enumerate(result[0].split(counts, dim=1)):
        own.check(part, row, late[row])


@long
@pytest.mark.parametrize("name", some(SOME, ["t5"], long))
@pytest.mark.usefixtures("_eagerly")
def test_the_pages_of_torch(name):
    """A score_mod and a block mask of logical positions, turned by torch into those of a pool."""
    experimental = "torch.nn.attention.experimental._paged_attention"
    paged = pytest.importorskip(experimental, reason="this PyTorch has no experimental pages")
    ends, size = torch.tensor([300, 100, 200]), 128
    own = Texts(name, 300)
    pages = paged.PagedAttention(8, size, BATCH, device="cpu")
    for row, end in ((1, 50), (0, 200), (2, 200), (1, 100), (0, 300)):
        pages.reserve(torch.tensor([row]), torch.tensor(end))
    k, v = (
        torch.full((1, a.shape[1], 8 * size, a.shape[3]), JUNK)
        for a in (own.arrays["k"], own.arrays["v"])
    )
    for row, end in enumerate(ends.tolist()):
        pos = torch.arange(end)
        tokens = own.tokens(row, pos)
        turned = posenc.transform(own.scheme, tokens["k"], pos, role="key", params=own.params)
        pages.assign(torch.tensor([row]), pos[None], turned, tokens["v"], k, v)
    q, q_pos, features = last(own, ends.tolist())
    q = posenc.transform(own.scheme, q, q_pos, role="query", params=own.params)
    # Positions as far as pages reach: of a page of another's, torch asks and forgets the answer.
    tokens, queries = posenc.Tokens(pos=torch.arange(8 * size)), posenc.Tokens(pos=q_pos)
    mask = posenc_torch.block_mask(1, 8 * size, causal=True, tokens=tokens, queries=queries)
    if features is not None:
        tokens = tokens.with_features(own.features(own.arrays)[1])
        queries = queries.with_features(features[0])
    mod = posenc_torch.score_mod(own.scheme, own.params, tokens=tokens, queries=queries)
    result = flex_attention(
        q, k, v, pages.get_score_mod(mod), pages.convert_logical_block_mask(mask),
        scale=own.scheme.scale(q.shape[3]), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    for row in range(BATCH):
        own.check(result[row], row, q_pos[row])


# What is read


def read_blocks(tokens, queries, window=None):
    given = {"tokens": tokens, "queries": queries, "window": window}
    mask = posenc_torch.block_mask(1, len(tokens.pos), causal=True, **given)
    return (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().tolist()


def test_blocks_of_a_static_cache_that_are_not_written_are_not_read():
    slots = posenc.Tokens(pos=torch.arange(8 * 128))
    queries = posenc.Tokens(pos=torch.tensor([[0], [127], [128], [900]]))
    assert read_blocks(slots, queries) == [1, 1, 2, 8]
    assert read_blocks(slots, queries, window=129) == [1, 1, 2, 2]


def test_blocks_of_a_pool_that_are_pages_of_others_are_not_read():
    pages = {0: [6, 1, 3], 1: [4], 2: [0, 7]}  # 2 and 5 are free
    pos, seg = torch.zeros(8, 128, dtype=torch.int64), torch.full((8, 128), NOBODY)
    for owner, own in pages.items():
        seg[own] = owner
        pos[own] = torch.arange(len(own) * 128).view(-1, 128)
    tokens = posenc.Tokens(pos=pos.flatten(), seg=seg.flatten())

    def at(*ends):
        return posenc.Tokens(pos=torch.tensor(ends)[:, None], seg=torch.arange(3)[:, None])

    assert read_blocks(tokens, at(300, 100, 200)) == [3, 1, 2]
    # A page that is given out and still to be written is not read, nor what a window leaves behind.
    assert read_blocks(tokens, at(100, 100, 127)) == [1, 1, 1]
    assert read_blocks(tokens, at(300, 100, 200), window=60) == [2, 1, 1]


# Compiled once


class CompileCounter:
    """A compiler that compiles nothing, and counts what it is asked to."""

    graphs = 0

    def __call__(self, graph, examples):
        self.graphs += 1
        return graph.forward


def decoder(own, memory, implementation):
    """One step of decoding, all of it: it transforms, writes and reads; and its features."""

    def step(tokens, pos, carry):
        features = own.features(tokens, pos, carry)
        memory.write(tokens, pos, pos, features)
        slots, queries = posenc.Tokens(pos=torch.arange(memory.k.shape[2])), posenc.Tokens(pos=pos)
        return memory.read(implementation, tokens["q"], features, slots, queries), features

    return step


def ten_steps(own, carry, step):
    for late in range(10):
        pos = torch.tensor(PROMPTS)[:, None] + late
        result, features = step(own.step(pos), pos, carry)
        for row in range(BATCH):
            own.check(result[row], row, pos[row])
        carry = own.last_sums(features, torch.zeros(BATCH, dtype=torch.int64))


INSIDE = [("both", "sdpa"), ("fox", "sdpa"), ("t5", "flex"), ("fox", "flex")]


@pytest.mark.parametrize(("name", "implementation"), some(INSIDE, [], long))
def test_ten_steps_compile_once_inside_a_program_of_the_user(name, implementation):
    own, counting = texts(name), CompileCounter()
    memory, *_, carry = prefilled(own, LONGEST)
    torch._dynamo.reset()
    step = torch.compile(decoder(own, memory, implementation), fullgraph=True, backend=counting)
    ten_steps(own, carry, step)
    assert counting.graphs == 1


@long
@pytest.mark.parametrize("name", some(SOME, ["fox"], long))
def test_ten_steps_compile_once_outside(name):
    own, counting = texts(name), CompileCounter()
    memory, *_, carry = prefilled(own, LONGEST)
    torch._dynamo.reset()
    with programs.replace_kernel(
        torch.compile(programs.kernel, backend=counting, **programs.COMPILER)
    ):
        ten_steps(own, carry, decoder(own, memory, "flex"))
    assert counting.graphs == 1


@long
@pytest.mark.parametrize(
    ("name", "slots"),
    # 256: whole blocks, which padding would leave as they are.
    some([("alibi", 256), ("fox", 200)], [("alibi", 256)]),
)
def test_the_kernel_inside_a_compiled_step(name, slots):
    own = texts(name)
    memory, *_, carry = prefilled(own, slots)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ten_steps(own, carry, torch.compile(decoder(own, memory, "flex"), fullgraph=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@exhaustive
@pytest.mark.parametrize("before", [True, False])
def test_the_kernel_between_layers(before):
    own = texts("alibi")
    memory, *_ = prefilled(own, LONGEST)
    heads, dim = own.arrays["q"].shape[1::2]
    linear = torch.nn.Linear(heads * dim, heads * dim)

    def layer(x, pos, implementation="flex"):
        q = linear(x) if before else x
        q = q.unflatten(-1, (heads, dim)).transpose(1, 2)
        slots, queries = posenc.Tokens(pos=torch.arange(LONGEST)), posenc.Tokens(pos=pos)
        out = memory.read(implementation, q, None, slots, queries)
        return out if before else 1 + out

    x, pos = torch.ones(BATCH, 1, heads * dim), torch.tensor(PROMPTS)[:, None] - 1
    torch._dynamo.reset()
    result = torch.compile(layer, fullgraph=True)(x, pos)
    assert_near(result.numpy(), layer(x, pos, "reference").numpy(), FLOAT32)


@exhaustive
@pytest.mark.parametrize("name", SOME)
def test_the_kernel_on_a_pool(name):
    own = texts(name)
    torch._dynamo.reset()
    a_paged_pool(own, "flex")
