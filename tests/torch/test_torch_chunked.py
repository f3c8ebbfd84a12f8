"""Attention part by part, and with a bias folded into the head dimension."""

from __future__ import annotations

import contextlib
import itertools
import math
import subprocess
import sys
import textwrap
import warnings
import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest
from frameworks_installed import require
from sample import long, some
from subjects import SUBJECTS, heads, normal, params_of

import posenc
from posenc import Tokens
from posenc.apply.bias import has_bias
from posenc.attn.arguments import Arguments
from posenc.attn.bias_forms import bias_by_key
from posenc.attn.implementations import Planned, Refusal
from posenc.schemes import Shaw, Sum
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM
from posenc.testing.tolerances import (
    ATTENTION_TOL,
    REDUCTION_FACTOR,
    attention_bound,
    rounding_bound,
)

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import array_api_compat.torch as xp
import torch
import torch.utils.checkpoint
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch_operations import Operations

import posenc_torch
from posenc.attn.negligible import negligible_blocks
from posenc.attn.prepare import prepare
from posenc_torch import folded
from posenc_torch.chunked import implementation as chunked
from posenc_torch.chunked import parts
from posenc_torch.chunked import scores as scores_of_parts
from posenc_torch.chunked.job import Job
from posenc_torch.chunked.table import table_of
from posenc_torch.chunked.tensors import TABLE, tensors_of
from posenc_torch.flex import programs


def two(keys):
    """The bound between two float32 results, each with its own error."""
    return 2 * attention_bound("float32", keys=keys)


STEEP = posenc.ALiBi(HEADS, slopes=[4.0, 2.0, 1.0, 0.25])
FADING = {
    "steep": STEEP,
    "learned": posenc.ALiBi(HEADS, learned=True, slopes=[4.0, 2.0, 1.0, 0.5]),
    "gated": SUBJECTS["fox"],
    "gated+t5": Sum(SUBJECTS["fox"], posenc.T5Bias(HEADS)),
    "kerple": SUBJECTS["kerple_log"],
}


def inputs(scheme, length, *, k_len=None, shared=None, dtype=torch.float32, learns=True, seed=0):
    """q, k, v, hidden states and params, leaves that learn."""
    count, k_len = heads(scheme), k_len or length
    kv_heads = shared or count
    shapes = {
        "q": (2, count, length, HEAD_DIM),
        "k": (2, kv_heads, k_len, HEAD_DIM),
        "v": (2, kv_heads, k_len, HEAD_DIM),
        "x": (2, k_len, HIDDEN_DIM),
    }
    arrays = {
        name: torch.tensor(normal(shape, seed + n)).to(dtype)
        for n, (name, shape) in enumerate(shapes.items())
    }
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    own = {name: torch.tensor(a).to(wide) for name, a in params_of(scheme).items()}
    for leaf in (*arrays.values(), *own.values()):
        leaf.requires_grad_(learns)
    return arrays, own


def attention(arrays, **options):
    """Attention with arrays of ``inputs``, of which x is a field of the tokens."""
    vectors = {n: a for n, a in arrays.items() if n != "x"}
    options["tokens"] = replace(options.get("tokens") or Tokens(), x=arrays.get("x"))
    return posenc_torch.attention(**vectors, **options)


def step(scheme, implementation, arrays, own, **options):
    """The result, and gradients of a weighted sum of it by name."""
    out = attention(arrays, scheme=scheme, params=own, implementation=implementation, **options)
    leaves = {n: a for n, a in {**arrays, **own}.items() if a.requires_grad}
    d_out = torch.tensor(normal(out.shape, 9)).to(out.dtype)
    result = torch.autograd.grad(out, list(leaves.values()), d_out, allow_unused=True)
    return out.detach(), {n: g for n, g in zip(leaves, result, strict=True) if g is not None}


LAYOUTS = {
    "rows": lambda a: a,
    "columns": lambda a: a.mT.contiguous().mT,
    "channels last": lambda a: a.contiguous(memory_format=torch.channels_last),
    "every second": lambda a: a.repeat_interleave(2, dim=3)[..., ::2],
    "one head for all": lambda a: a[:, :1].expand(a.shape),
    "one channel for all": lambda a: a[..., :1].expand(a.shape),
}


@pytest.mark.parametrize("width", [HEAD_DIM // 2, HEAD_DIM, 2 * HEAD_DIM])
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_in_memory_does_not_matter(layout, name, width):
    """Nor does that of the gradient of the result, where values are narrower or wider than keys."""
    arrays, own = inputs(STEEP, 70)
    del arrays["x"]
    arrays["v"] = torch.tensor(normal((2, HEADS, 70, width), 3)).float()
    wide = torch.tensor(normal((2, HEADS, 70, width), 4)).float()
    answers = []
    for lay in (LAYOUTS[layout], lambda a: LAYOUTS[layout](a).contiguous()):
        given = {n: a.detach() for n, a in arrays.items()}
        given[name] = lay(given[name])
        leaves = [a.requires_grad_() for a in given.values()]
        with parts.small_blocks(16):
            out = attention(given, scheme=STEEP, params=own, causal=True, implementation="chunked")
            answers.append((out, *torch.autograd.grad(out, leaves, lay(wide))))
    for found, expected in zip(*answers, strict=True):
        assert_near(found.detach(), expected.detach(), two(70))


def call_of(scheme, length, shared=None, causal=False, skip_blocks=True, window=None):
    arrays, own = inputs(scheme, length, shared=shared, learns=False)
    q, k, v, x = arrays.values()
    given = Arguments(window=window, tokens=Tokens(x=x))
    return prepare(q, k, v, scheme, own, causal, given, skip_blocks=skip_blocks, xp=xp)


# Parts


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 40}], ids=str)
@pytest.mark.parametrize("shared", [HEADS, 2, 1])
def test_every_query_of_every_head_is_in_one_part(shared, options):
    call = call_of(STEEP, 200, shared, **options)
    times = torch.zeros(HEADS, 200)
    with parts.small_blocks(16):
        for part in parts.parts(call):
            times[part.heads, part.queries] += 1
            group = HEADS // shared
            own = {h // group for h in range(part.heads.start, part.heads.stop)}
            assert len(own) == 1 or group == 1 or part.heads == slice(0, HEADS)
    assert (times == 1).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shared", [6, 2, 1])
def test_runs_of_heads_cost_least(shared, threads):
    """Of all ways to cut them; each thread computes the gradients of some heads of a part."""
    group = 6 // shared
    every_cut = [
        [0, *(n for n in range(1, 6) if cuts >> n & 1), 6]
        for cuts in range(0, 64, 2)
        if group == 1 or cuts == 0 or all(cuts >> n & 1 for n in range(group, 6, group))
    ]

    def total(runs):
        slots = [-(-(run.stop - run.start) // threads) for run, _ in runs]
        blocks = [last - first for _, (first, last) in runs]
        return threads * sum(1 + n * m for n, m in zip(slots, blocks, strict=True))

    def run_of(spans, start, stop):
        few = spans[start:stop]
        return slice(start, stop), (min(s[0] for s in few), max(s[1] for s in few))

    for seed in range(8):
        draw = np.random.default_rng(seed)
        spans = [(int(first), int(first + n)) for first, n in draw.integers(1, 9, (6, 2))]
        kept = torch.tensor([[a <= n < b for n in range(20)] for a, b in spans])
        least = min(
            total([run_of(spans, *ends) for ends in itertools.pairwise(cuts)]) for cuts in every_cut
        )
        (found,) = parts._spans(kept[:, None])
        runs = parts._runs(found, 6, group, 1, threads)
        assert [n for run, _ in runs for n in range(run.start, run.stop)] == list(range(6))
        assert total(runs) == least


def pairs(call):
    """How many pairs of a query and a key the parts hold."""
    with parts.small_blocks(16):
        return sum(
            (p.heads.stop - p.heads.start) * (p.queries.stop - p.queries.start) * sum(p.key_counts)
            for p in parts.parts(call)
        )


def test_parts_leave_out_masked_and_negligible_keys():
    total = HEADS * 320 * 320
    flat = replace(STEEP, slopes=[1e-4] * HEADS)
    assert pairs(call_of(flat, 320)) == total
    half = pairs(call_of(flat, 320, causal=True))
    assert 0.5 * total <= half <= 0.55 * total
    assert pairs(call_of(STEEP, 320, causal=True, skip_blocks=False)) == half
    assert pairs(call_of(STEEP, 320, causal=True)) < 0.5 * half
    # A window of 32 reaches over three blocks of 16, of at most 20.
    assert pairs(call_of(flat, 320, causal=True, window=32)) <= total * 3 / 20


@pytest.mark.parametrize("skip_blocks", [True, False])
@pytest.mark.parametrize("scheme", [STEEP, Sum(STEEP, posenc.T5Bias(HEADS))], ids=["one", "sum"])
def test_no_weight_is_subnormal(scheme, skip_blocks):
    """Some processors calculate a hundred times more slowly with subnormal numbers."""
    call = call_of(scheme, 160, causal=True, skip_blocks=skip_blocks)
    tensors = tensors_of(call, table_of(call))
    visible = posenc.causal.pairs(Tokens(pos=torch.arange(160)[:, None]), call.key, xp)

    def subnormal(table):
        """Of how many weights, relative to the largest of their row."""
        bias = table.unfold(1, 160, 1).flip(1)
        scores = call.scale * call.q.detach() @ call.k.detach().mT + bias
        scores = torch.where(visible, scores, -torch.inf)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return int(((weights > 0) & (weights < torch.finfo(weights.dtype).smallest_normal)).sum())

    assert subnormal(tensors[TABLE]) > 0
    table = Job.of(call, tensors)[1][TABLE]
    assert subnormal(table) == 0
    # What could have a normal weight stays.
    kept = torch.isfinite(table[:, :160]).sum(1)
    assert (kept >= torch.tensor([4, 8, 16, 64])).all()


def test_parts_under_a_short_window_are_small():
    """A window of 64 keys: parts of 128 queries see 192 keys."""
    call = call_of(posenc.NoPE(), 1024, causal=True, window=64)
    assert {p.queries.stop - p.queries.start for p in parts.parts(call)} == {128}
    assert max(p.keys.stop - p.keys.start for p in parts.parts(call)) == 192


def test_first_tokens_beside_a_window_do_not_stretch_it():
    """Four first tokens cost one block of keys more for each query, at any length."""
    for length in (320, 640):
        call = call_of(posenc.NoPE(), length, causal=True, window=32)
        of_window = pairs(call)
        first = call.q.shape[1] * length * 16
        with_first = replace(call, mask=replace(call.mask, first_tokens=4))
        assert pairs(with_first) <= of_window + first


FIRST = {  # each reads keys in its own way
    "none": posenc.NoPE(),
    "table": posenc.T5Bias(HEADS),
    "slopes": posenc.ALiBi(HEADS, learned=True),
    "tokens": Shaw(HEAD_DIM, max_distance=64),
    "gates": SUBJECTS["fox"],
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": normal((2, HEADS, 150, 150), 5, "float32")},
        {"mask": normal((2, 1, 150, 150), 6) > -1},
        {"softcap": 3.0},
        {"tokens": Tokens(seg=np.arange(150) // 90)},
        {"queries": Tokens(np.arange(150) * 2 + 9), "tokens": Tokens(np.arange(150) * 2)},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("name", FIRST)
def test_first_tokens_beside_a_window(name, options):
    scheme = FIRST[name]
    arrays, own = inputs(scheme, 150, shared=2 if heads(scheme) == HEADS else None)
    given, mask = Arguments(**options).map(torch.tensor), posenc.window(20, first=3)
    mask = mask if given.mask is None else mask & given.mask
    options = {"causal": True, **given._replace(mask=mask)._asdict()}
    with parts.small_blocks(16):
        out, gradients = step(scheme, "chunked", arrays, own, **options)
    expected, others = step(scheme, "reference", arrays, own, **options)
    assert_near(out, expected, two(150))
    assert gradients.keys() == others.keys()
    for n, gradient in gradients.items():
        assert_near(gradient, others[n], REDUCTION_FACTOR * two(150), n)


FADED = 240  # tokens


def order_bound(dtype, length=FADED):
    """How far two orders of the same sums of queries, keys and values may be apart.

    Both round in the working dtype, and in half precision then cast weights, values, result.
    """
    if dtype == torch.bfloat16:
        return 2 * (attention_bound("float32", keys=length) + rounding_bound(3, 1, "bfloat16"))
    return 2 * attention_bound(str(dtype).removeprefix("torch."), keys=length)


def order_bound_of_params(arrays, own, out):
    """Likewise of gradients of learned numbers and hidden states, which sum over rows.

    The gradients of a row's scores are ``w * (d_out @ v - d_out @ out)`` and sum to 0. Errors of
    scores are in both terms alike; what is left is how a row's sums of keys and channels round,
    relative to ``|d_out| @ |out|``. Rows round independently of each other. Each reaches all gates
    before it, or distances as far: a learned number sums so many, a hidden state has one a head.
    """
    d_out, x = torch.tensor(normal(out.shape, 9)), arrays["x"].detach().double()
    rows = torch.linalg.vector_norm((d_out * out.double()).abs().sum(-1), dim=(0, 2)).max()
    weights = [a for name, a in own.items() if name in ("w", "0_w")]
    heads_of_x = weights[0].detach().abs().sum(0).max() if weights else 0.0
    each = rounding_bound(
        2 * FADED + 2 * HEAD_DIM, float(rows), str(out.dtype).removeprefix("torch.")
    )
    whole = 2 * each * FADED * float(x.abs().max())
    return {**dict.fromkeys(own, whole), "x": 2 * each * float(heads_of_x)}


@pytest.mark.parametrize("name", some(FADING, ["steep", "gated+t5"], long))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_skipping_blocks_changes_at_most_a_rounding(name, dtype):
    scheme = FADING[name]
    arrays, own = inputs(scheme, FADED, dtype=dtype)
    left_out = torch.finfo(dtype).eps / 2  # of the largest value
    with parts.small_blocks(8):
        for options in ({"causal": True}, {"causal": True, "window": 150}, {}):
            skipped = step(scheme, "chunked", arrays, own, **options)
            unskipped = step(scheme, "chunked", arrays, own, skip_blocks=False, **options)
            bound = order_bound(dtype) + left_out
            assert_near(skipped[0].double(), unskipped[0].double(), bound)
            assert skipped[1].keys() == unskipped[1].keys()
            for leaf in "qkv":  # which go through the scores once more
                assert_near(skipped[1][leaf].double(), unskipped[1][leaf].double(), 2 * bound, leaf)
            if dtype == torch.bfloat16:  # learned numbers sum over roundings of 8 bits: no bound
                continue
            for leaf, allowed in order_bound_of_params(arrays, own, unskipped[0]).items():
                if leaf in unskipped[1]:
                    error = (skipped[1][leaf] - unskipped[1][leaf]).abs().max()
                    assert error <= allowed, (leaf, error, allowed)


def test_a_region_of_far_keys_beside_gates():
    """Queries do not see their own keys there, and the first queries see none."""
    scheme = Sum(SUBJECTS["rerope"], SUBJECTS["fox"])
    arrays, own = inputs(scheme, 60)
    expected = step(scheme, "reference", arrays, own, causal=True)
    with parts.small_blocks(8):
        result = step(scheme, "chunked", arrays, own, causal=True)
    assert_near(result[0], expected[0], two(60))
    for leaf in "qkv":
        assert_near(result[1][leaf], expected[1][leaf], 2 * two(60), leaf)


@pytest.mark.parametrize("shared", [2, 1])
def test_skipping_blocks_where_heads_share_keys(shared):
    arrays, own = inputs(STEEP, 240, shared=shared)
    expected = step(STEEP, "reference", arrays, own, causal=True)
    with parts.small_blocks(8):
        result = step(STEEP, "chunked", arrays, own, causal=True)
    assert_near(result[0], expected[0], two(240))
    for leaf, gradient in expected[1].items():
        assert_near(result[1][leaf], gradient, two(240), leaf)


@pytest.mark.parametrize(("shared", "step"), [(None, 3), (2, 2), (1, 1)])
def test_a_part_with_a_bias_for_each_score_has_few_heads(shared, step):
    """Of whole groups that share keys, or one; a bias by distance needs no such part."""
    call = call_of(SUBJECTS["shaw"], 300, shared=shared)
    token = parts._sizes.set(parts.BlockSizes(128, 256, 2 * 3 * 256 * 300))
    try:
        runs = [part.heads for part in parts.parts(call) if part.queries.start == 0]
        assert [run.start for run in runs] == [*range(0, HEADS, step)]
        assert [run.stop for run in runs] == [*range(step, HEADS, step), HEADS]
        by_distance = call_of(SUBJECTS["t5"], 300, shared=shared)
        assert len([*parts.parts(by_distance)]) == 2  # of queries
    finally:
        parts._sizes.reset(token)


def test_default_block_sizes():
    """As users have them: 128 keys, 256 queries, lengths that are no multiple."""
    for scheme, length, k_len in ((STEEP, 700, 700), (posenc.T5Bias(HEADS), 300, 900)):
        arrays, own = inputs(scheme, length, k_len=k_len)
        expected = step(scheme, "reference", arrays, own, causal=True)
        result = step(scheme, "chunked", arrays, own, causal=True)
        assert_near(result[0], expected[0], two(k_len))
        for leaf, gradient in expected[1].items():
            # A number of a table is in half a million scores, a result in 900: errors of terms of
            # both signs grow like the root.
            size = 1 if leaf in arrays else math.sqrt(2 * length * k_len / 900)
            assert_near(result[1][leaf], gradient, size * two(k_len), leaf)


@pytest.mark.parametrize(
    ("scheme", "by_kernel", "by_scores"),
    # Of the last, a learned table needs the scores of near keys alone in parts with many others.
    [
        pytest.param(STEEP, 5, 0, id="steep"),
        pytest.param(posenc.T5Bias(HEADS), 0, 5, id="t5"),
        pytest.param(SUBJECTS["shaw"], 0, 5, id="shaw"),
        pytest.param(posenc.T5Bias(HEADS, 8, 10, causal=True), 3, 5, id="near"),
    ],
)
def test_a_backward_pass_on_a_cpu_computes_each_part_once(scheme, by_kernel, by_scores):
    arrays, own = inputs(scheme, 80)
    with parts.small_blocks(16):
        out = attention(arrays, scheme=scheme, params=own, implementation="chunked", causal=True)
        with Operations() as operations:
            out.sum().backward()
    kernels = operations.count("aten._scaled_dot_product_flash_attention_for_cpu_backward.")
    assert kernels >= by_kernel
    assert bool(kernels) == bool(by_kernel)
    assert operations.count("aten.exp_.") == by_scores
    assert operations.count("aten._scaled_dot_product_flash_attention_for_cpu.") == 0
    assert operations.count("softmax") == 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("count", [1, HEADS])
def test_a_bias_of_each_head_or_one_learns_from_all(batch, count, monkeypatch):
    """Some heads at a time, which share keys, give the gradients of bias, q, k and v."""
    monkeypatch.setattr(scores_of_parts, "_SCORES", 2 * 2 * 16 * 16)  # of few keys
    arrays, _ = inputs(posenc.NoPE(), 40, shared=2)
    bias = torch.tensor(normal((batch, count, 40, 40), 5)).float().requires_grad_()
    gradients = {}
    for name in ("chunked", "reference"):
        with parts.small_blocks(16):
            given = {"scheme": posenc.NoPE(), "bias": bias, "causal": True, "implementation": name}
            out = attention(arrays, **given)
            gradients[name] = torch.autograd.grad(
                out.square().sum(), [bias, arrays["q"], arrays["k"], arrays["v"]]
            )
    for found, expected in zip(gradients["chunked"], gradients["reference"], strict=True):
        assert_near(found, expected, REDUCTION_FACTOR * two(40))


FLAT_FAR_AWAY = [n for n, s in SUBJECTS.items() if s.constant_beyond()[0] is not None]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 60}], ids=str)
@pytest.mark.parametrize("name", FLAT_FAR_AWAY)
def test_far_keys_learn(name, options):
    """The number that they share gets what the others' gradients leave of a sum of 0."""
    arrays, own = inputs(SUBJECTS[name], 100, k_len=130, dtype=torch.float64)
    expected = step(SUBJECTS[name], "reference", arrays, own, **options)
    with parts.small_blocks(16):
        result = step(SUBJECTS[name], "chunked", arrays, own, **options)
    assert result[1].keys() == expected[1].keys()
    for leaf, gradient in expected[1].items():
        assert_near(result[1][leaf], gradient, two(130) * 2.0**-29, leaf)


def test_only_requested_gradients_are_computed():
    arrays, own = inputs(FADING["learned"], 100, learns=False)
    arrays["k"].requires_grad_()
    with parts.small_blocks(16):
        out = attention(
            arrays, scheme=FADING["learned"], params=own, implementation="chunked", causal=True
        )
        out.sum().backward()
        assert arrays["k"].grad is not None
        assert arrays["q"].grad is None
        plain = posenc_torch.attention(
            arrays["q"], arrays["q"], arrays["q"], STEEP, implementation="chunked", causal=True
        )
    assert not plain.requires_grad


AUTOCAST = {
    "steep": STEEP,
    "growing": posenc.ALiBi(HEADS, slopes=[-1.0, -0.5, -0.1, -2.0]),
    "gated": SUBJECTS["fox"],
}


@pytest.mark.parametrize("name", ["fox", "selective", "fire", "sinusoidal", "rope"])
def test_autocast_rounds_nothing_that_the_core_computes(name):
    scheme = SUBJECTS[name]
    own = {n: torch.tensor(a, dtype=torch.float32) for n, a in params_of(scheme).items()}
    count, pos = heads(scheme), torch.arange(9)
    x = torch.tensor(normal((1, 9, HIDDEN_DIM), 3), dtype=torch.float32)
    q = torch.tensor(normal((1, count, 9, HEAD_DIM), 4), dtype=torch.float32)

    def everything():
        tokens = Tokens(x=x) if posenc.backend.reads_hidden(scheme) else Tokens()
        _, keys = posenc.features(scheme, own, tokens, q=q, k=q)
        yield from (keys.features or {}).values()
        yield posenc.embedding(scheme, pos, own)
        yield posenc.transform(scheme, q, pos, role="key", params=own, features=keys.features)
        yield posenc.attention(q, q, q, scheme, own, tokens=tokens)
        if not posenc.backend.reads_features(scheme):
            yield posenc.bias(scheme, pos, pos, own)

    expected = list(everything())
    with torch.autocast("cpu", torch.bfloat16):
        found = list(everything())
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["chunked", "folded", "sdpa", "reference"])
@pytest.mark.parametrize("name", some(AUTOCAST, ["growing"], long))
def test_autocast_rounds_queries_keys_and_values_and_nothing_else(name, implementation):
    scheme = AUTOCAST[name]
    arrays, own = inputs(scheme, 700, learns=False)
    exact, wide = inputs(scheme, 700, learns=False, dtype=torch.float64)
    for leaf in (*(arrays[n] for n in "qkv"), *(exact[n] for n in "qkv")):
        leaf.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = step(scheme, implementation, arrays, own, causal=True)
    expected = step(scheme, "reference", exact, wide, causal=True)
    assert result[0].dtype == torch.float32
    assert_near(result[0].double(), expected[0], ATTENTION_TOL["bfloat16"])
    for leaf in "qkv":
        assert result[1][leaf].dtype == torch.float32
        assert_near(result[1][leaf].double(), expected[1][leaf], ATTENTION_TOL["bfloat16"], leaf)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
def test_a_backward_pass_under_autocast_is_one_without(options):
    """Parts are computed again there: with autocast, in half precision and with rounded masks."""
    arrays, own = inputs(AUTOCAST["growing"], 300)
    gradients = []
    for backward_too in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            call = {"scheme": AUTOCAST["growing"], "implementation": "chunked", "causal": True}
            out = attention(arrays, params=own, **call, **options)
            leaves, d_out = [arrays[n] for n in "qkv"], torch.ones_like(out)
            if backward_too:
                gradients += torch.autograd.grad(out, leaves, d_out)
        if not backward_too:
            gradients += torch.autograd.grad(out, leaves, d_out)
    for inside, outside in zip(gradients[:3], gradients[3:], strict=True):
        assert torch.equal(inside, outside)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["kernel", "all scores"])
@pytest.mark.parametrize("changed", ["mask", "pos", "seg"])
def test_what_decides_pairs_and_changes_before_the_backward_pass_is_noticed(changed, options):
    """Parts read it again: without an error, the gradient would be that of another call."""
    arrays, own = inputs(STEEP, 40)
    decides = {
        "mask": torch.ones((1, 1, 40, 40), dtype=torch.bool),
        "pos": torch.arange(40),
        "seg": torch.zeros((2, 40), dtype=torch.int64),
    }
    tokens = posenc.Tokens(pos=decides["pos"], seg=decides["seg"])
    call = {"mask": decides["mask"], "tokens": tokens, "causal": True, **options}
    out = attention(arrays, scheme=STEEP, params=own, implementation="chunked", **call)
    decides[changed][..., 20:] = decides[changed][..., :20].clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


ROWS = posenc.make("cope", head_dim=HEAD_DIM)


@pytest.mark.parametrize("scheme", [STEEP, ROWS], ids=["parts", "rows"])
@pytest.mark.parametrize("changed", ["mask", "pos"])
def test_autograd_may_keep_what_was_there_before_a_change(scheme, changed):
    """Then the backward pass reads what it kept, not the arrays of the call."""
    arrays, own = inputs(scheme, 40)
    decides = {"mask": torch.rand(1, 1, 40, 40) < 0.7, "pos": 3 * torch.arange(40)}
    leaves, d_out = [arrays[n] for n in "qkv"], torch.tensor(normal((2, HEADS, 40, HEAD_DIM), 9))
    d_out = d_out.float()

    def attend(implementation):
        tokens = posenc.Tokens(pos=decides["pos"])
        return attention(
            arrays, scheme=scheme, params=own, implementation=implementation, causal=True,
            mask=decides["mask"], tokens=tokens,
        )  # fmt: skip

    expected = torch.autograd.grad(attend("reference"), leaves, d_out)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        out = attend("chunked")
        decides[changed].zero_()
        gradients = torch.autograd.grad(out, leaves, d_out)
    for name, gradient, exact in zip("qkv", gradients, expected, strict=True):
        assert_near(gradient, exact, two(40), name)


@pytest.mark.parametrize("scheme", [STEEP, ROWS], ids=["parts", "rows"])
def test_a_function_that_shows_other_pairs_in_the_backward_pass_is_noticed(scheme):
    """A variable of a loop has its last value there; a function with a value of its own has not."""
    arrays, own = inputs(scheme, 40)
    call = {"scheme": scheme, "params": own, "implementation": "chunked"}

    def total(masks):
        return sum(attention(arrays, **call, mask=mask).square().sum() for mask in masks)

    late = total(lambda i, j: (j <= i) | (j < prefix) for prefix in (5, 30))  # noqa: B023  # on purpose
    with pytest.raises(RuntimeError, match="shows other pairs in the backward pass"):
        late.backward()
    bound = total(lambda i, j, n=prefix: (j <= i) | (j < n) for prefix in (5, 30))
    bound.backward()


def test_arrays_of_inference_mode_decide_pairs_in_training():
    arrays, own = inputs(STEEP, 40)
    gradients = []
    for inference in (True, False):
        with torch.inference_mode(inference):
            pos, sees = torch.arange(40), torch.ones((1, 1, 40, 40), dtype=torch.bool)
        call = {"causal": True, "mask": sees, "tokens": posenc.Tokens(pos=pos)}
        gradients.append(step(STEEP, "chunked", arrays, own, **call)[1])
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])


def test_autocast_does_not_change_which_blocks_are_negligible():
    """Large scores: an own score rounded up to 8 bits would hide the query's own block."""
    q = torch.full((1, 1, 1100, 64), 40.25).bfloat16()
    v = torch.tensor(normal((1, 1, 1100, 64), 0)).bfloat16()
    scheme = posenc.ALiBi(1, slopes=[0.1])
    wide = (q.double(), q.double(), v.double())
    expected = posenc_torch.attention(*wide, scheme, causal=True, implementation="reference")
    with torch.autocast("cpu", torch.bfloat16):
        result = posenc_torch.attention(q, q, v, scheme, causal=True, implementation="chunked")
    assert_near(result.double(), expected, ATTENTION_TOL["bfloat16"])


def test_finding_negligible_blocks_multiplies_no_matrices():
    """A GPU may multiply them in TF32, and float32 copies of q and k would fill its memory."""
    q = torch.tensor(normal((1, HEADS, 40, HEAD_DIM), 0)).bfloat16()
    call = prepare(q, q, q, STEEP, causal=True, xp=xp)
    with Operations() as operations:
        negligible_blocks(call, 8)
    assert not operations.count("mm.")
    assert not operations.count("aten.dot.")


def test_unsupported_derivatives():
    arrays, _ = inputs(STEEP, 40)
    q = arrays["q"]

    def attend(q):
        return posenc_torch.attention(q, q, q, STEEP, implementation="chunked", causal=True)

    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda q: attend(q).sum())(q)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(attend(q).sum(), [q], create_graph=True)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(attend(q), [q], torch.ones(2, *q.shape), is_grads_batched=True)
    with pytest.raises(NotImplementedError, match="forward mode"), forward_ad.dual_level():
        attend(forward_ad.make_dual(q.detach(), q.detach()))


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5"])
def test_auto_has_derivatives_in_forward_mode(name):
    """By the reference: the kernels of SDPA have none."""
    scheme = SUBJECTS[name]
    arrays, own = inputs(scheme, 6, dtype=torch.float64, learns=False)
    vectors = arrays["q"], arrays["k"], arrays["v"]

    def attend(implementation, *tensors):
        return posenc_torch.attention(
            *tensors, scheme, own, causal=True, implementation=implementation
        )

    found, expected = (
        torch.func.jvp(lambda *a, n=n: attend(n, *a), vectors, vectors)[1]
        for n in ("auto", "reference")
    )
    torch.testing.assert_close(found, expected)
    named = ["sdpa", "folded"] if name == "alibi" else ["sdpa"]  # a key bias to fold in
    for implementation in named:
        refused = pytest.raises(NotImplementedError, match="derivative in forward mode")
        with refused, forward_ad.dual_level():
            attend(implementation, *vectors)


@pytest.mark.parametrize("implementation", ["auto", "sdpa", "folded"])
@pytest.mark.parametrize("width", [HEAD_DIM, 2 * HEAD_DIM])
def test_second_derivatives_of_a_kernel_say_what_has_them(implementation, width):
    """A first derivative may still be asked for with a graph of its own."""
    arrays, _ = inputs(STEEP, 20)
    q, k, v = arrays["q"], arrays["k"], torch.tensor(normal((2, HEADS, 20, width), 3)).float()

    def gradient(name, **graph):
        out = posenc_torch.attention(q, k, v, STEEP, causal=True, implementation=name)
        return torch.autograd.grad(out.square().sum(), [q, k], **graph)

    firsts = gradient(implementation, create_graph=True)
    for first, plain in zip(firsts, gradient(implementation), strict=True):
        assert torch.equal(first, plain)
        with pytest.raises(NotImplementedError, match="implementation='reference'"):
            torch.autograd.grad(first.sum(), [q], retain_graph=True)
    seconds = torch.autograd.grad(gradient("reference", create_graph=True)[0].sum(), [q])
    assert torch.isfinite(seconds[0]).all()


def test_auto_is_traced_whatever_the_length():
    q = torch.tensor(normal((1, HEADS, 1100, HEAD_DIM), 0), dtype=torch.float32)

    def attend(q):
        return posenc_torch.attention(q, q, q, STEEP, causal=True)

    expected = attend(2 * q)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit says that it is old, and that lengths are kept
        assert_near(torch.jit.trace(attend, q)(2 * q), expected, two(1100))
    assert_near(make_fx(attend, tracing_mode="real")(q)(2 * q), expected, two(1100))


@pytest.mark.parametrize("implementation", ["chunked", "sdpa"])
def test_nothing_is_kept_after_a_backward_pass(implementation):
    arrays, _ = inputs(STEEP, 600)
    q = arrays["q"] * 1
    alive = weakref.ref(q)
    loss = posenc_torch.attention(q, q, q, STEEP, causal=True, implementation=implementation).sum()
    del q
    assert alive() is not None
    loss.backward()
    assert alive() is None

    def layer(q):
        nonlocal alive
        q = 2 * q
        alive = weakref.ref(q)
        return posenc_torch.attention(q, q, q, STEEP, causal=True, implementation=implementation)

    out = torch.utils.checkpoint.checkpoint(layer, arrays["q"], use_reentrant=False)
    assert alive() is None
    arrays["q"].grad = None
    out.sum().backward()
    again = layer(arrays["q"].detach().requires_grad_())
    assert torch.isfinite(arrays["q"].grad).all()
    assert torch.equal(out, again)


def test_sums_over_many_parts_keep_growing():
    """Of 1024 equal terms bfloat16 adds no more than 256."""
    q, k, v = (torch.zeros(1, 1, n, HEAD_DIM, dtype=torch.bfloat16) for n in (4096, 4, 4))
    options = {"scheme": posenc.ALiBi(1, slopes=[1e-6]), "implementation": "chunked"}
    where = {"tokens": Tokens(pos=torch.arange(4)), "queries": Tokens(pos=torch.arange(4096))}
    with parts.small_blocks(4):
        posenc_torch.attention(q, k, v.requires_grad_(), **options, **where).sum().backward()
    assert_near(v.grad.double(), np.full(v.shape, 1024.0), ATTENTION_TOL["bfloat16"])


@dataclass(frozen=True)
class Elsewhere(posenc.PositionScheme):
    """Learns an embedding, and has a hook for a bias."""

    def param_specs(self):
        return {"table": posenc.ParamSpec((40, HEAD_DIM), per_head=False)}

    def bias(self, q, k, *, params, xp):
        return None


def test_an_unused_param_has_no_gradient():
    arrays, _ = inputs(Elsewhere(), 40, learns=False)
    own = {"table": torch.zeros(40, HEAD_DIM, requires_grad=True)}
    for learns in (False, True):
        arrays["q"].requires_grad_(learns)
        options = {"scheme": Elsewhere(), "params": own, "causal": True}
        attention(arrays, implementation="chunked", **options).sum().backward()
        assert own["table"].grad is None
        assert (arrays["q"].grad is not None) == learns


@dataclass(frozen=True)
class Level(posenc.PositionScheme, relative=True):
    """One value per head for all pairs: a bias without axes of queries and keys."""

    def constants(self):
        return {"level": (0.5, 1.0, -1.0, 0.0)}

    def bias(self, q, k, *, params, xp):
        return params["level"]

    def key_bias(self, k, *, params, xp):
        return params["level"]


@pytest.mark.parametrize("scheme", [Level(), posenc.ALiBi(1, slopes=[1.0])], ids=repr)
def test_a_bias_without_axes_and_one_slope_for_all_heads(scheme):
    """A bias without axes, and one head's slope for every head."""
    arrays, _ = inputs(STEEP, 40, learns=False)
    for where in ({}, {"tokens": Tokens(pos=torch.arange(40))}):
        expected = attention(
            arrays, scheme=scheme, causal=True, implementation="reference", **where
        )
        for implementation in ("flex", "chunked", "sdpa", *([] if where else ["folded"])):
            with programs.uncompiled(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="flex_attention called without")
                result = attention(
                    arrays, scheme=scheme, causal=True, implementation=implementation, **where
                )
            assert_near(result, expected, two(40), implementation)


@dataclass(frozen=True)
class Past(posenc.PositionScheme):
    """A query sees earlier keys alone; ``key_bias`` is there, and returns None."""

    def bias(self, q, k, *, params, xp):
        return xp.where(k < q, 0.0, -xp.inf)

    def key_bias(self, k, *, params, xp):
        return None


@pytest.mark.parametrize("options", [{"softcap": 4.0}, {"return_lse": True}], ids=str)
def test_a_bias_may_hide_all_keys_of_a_query(options):
    q, k, v = (torch.tensor(normal((1, 2, 5, 4), seed, "float32")) for seed in range(3))
    found, expected = (
        posenc_torch.attention(q, k, v, Past(), causal=True, implementation=name, **options)
        for name in ("chunked", "reference")
    )
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, ATTENTION_TOL["float32"])


def test_tensors_without_values():
    explanations = []
    for where in ("meta", "fake"):
        with FakeTensorMode() if where == "fake" else contextlib.nullcontext():
            q = torch.empty(1, HEADS, 4096, HEAD_DIM, device="meta" if where == "meta" else "cpu")
            explanations.append(posenc_torch.explain(q, q, q, STEEP, causal=True))
            assert posenc_torch.attention(q, q, q, STEEP, causal=True).shape == q.shape
    assert [one["implementation"] for one in explanations] == ["sdpa", "sdpa"]
    assert all("these tensors have none" in one["others"]["chunked"] for one in explanations)


def test_tensor_subclasses_are_not_cut():
    """Such as DTensor: every slice of one is communication."""
    call = call_of(STEEP, 1024, causal=True)
    assert isinstance(chunked.plan(call), Planned)
    refused = chunked.plan(replace(call, q=TwoTensor(call.q, call.q)))
    assert isinstance(refused, Refusal)
    assert "q is a TwoTensor" in refused.why


def test_auto_takes_chunked_where_scores_are_many():
    def explain(length, scheme=STEEP, q_len=None):
        q, k = (torch.zeros(1, HEADS, n, HEAD_DIM) for n in (q_len or length, length))
        return posenc_torch.explain(q, k, k, scheme, causal=True)

    assert explain(4096)["implementation"] == "chunked"
    assert explain(512)["implementation"] == "sdpa"
    assert "few scores" in explain(512)["others"]["chunked"]
    assert "few scores" in explain(10**5, q_len=1)["others"]["chunked"]
    assert "needs no mask" in explain(4096, posenc.NoPE())["others"]["chunked"]


@long
def test_auto_compiles_whole_where_scores_are_many():
    q = torch.tensor(normal((1, HEADS, 1100, HEAD_DIM), 0), dtype=torch.float32)

    def attend(q, implementation="auto"):
        return posenc_torch.attention(q, q, q, STEEP, causal=True, implementation=implementation)

    torch._dynamo.reset()
    result = torch.compile(attend, fullgraph=True, backend="aot_eager")(q)
    assert_near(result, attend(q, "chunked"), two(1100))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    broken = torch.compile(lambda q: attend(2 * q, "chunked") + 1, backend=counter)(q)
    assert_near(broken, attend(2 * q, "chunked") + 1, two(1100))
    assert counter.frame_count <= 3  # before it, after it, and what checks its arguments


MEMORY = """
    import resource, torch, posenc, posenc_torch

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    def step(length):
        q, k, v = torch.randn(3, 1, 8, length, 16, requires_grad=True).unbind()
        table = torch.zeros(8, 32, requires_grad=True)
        for scheme, own in ((posenc.ALiBi(8), {}), (posenc.T5Bias(8), {"table": table})):
            posenc_torch.attention(q, k, v, scheme, own, causal=True).sum().backward()

    step(1100)
    before = peak()
    step(6144)
    print(peak() - before)
"""


@long
def test_the_memory_of_training_is_linear():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY)], capture_output=True, text=True, check=True
    )
    # One score for each pair would be 1.2 GB, and a backward pass holds several. What is held: 12
    # MB for each of q, k, v and their gradients, and T5's parts of 8 * 256 * 6144 scores, 50 MB.
    assert int(done.stdout) < 700


FORWARD_MEMORY = """
    import resource, torch, posenc, posenc_torch

    def attend(length):
        q, k, v = torch.randn(3, 1, 2, length, 16).unbind()
        at = torch.arange(length)[:, None]
        options = {"tokens": posenc.Tokens(places=at), "implementation": "chunked"}
        posenc_torch.attention(q, k, v, posenc.ALiBi(2), causal=True, **options)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    before = attend(1100)
    print(attend(12288) - before)
"""


@long
def test_parts_that_grow_fit_where_earlier_ones_were():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORWARD_MEMORY)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    # The largest part has 2 * 256 * 12288 scores, 24 MB, and about six arrays of them at a time.
    # Room for each of the 48 parts would be 560 MB.
    assert int(done.stdout) < 300


# Folded

KEYED = [
    name for name, scheme in {**SUBJECTS, **FADING}.items()
    # What is folded has no log-sum-exp, by which a sink would be put in, and no whole rows.
    if has_bias(scheme) and name != "silent" and not {"sink", "adjust_scores"} & scheme.hooks()
    and bias_by_key(call_of(scheme, 4, causal=True)) is not None
]  # fmt: skip


@pytest.mark.parametrize("q_len", [60, 1])
@pytest.mark.parametrize("shared", [None, 1], ids=["own", "shared"])
@pytest.mark.parametrize("name", KEYED)
def test_a_folded_bias_is_the_bias(name, shared, q_len):
    scheme, sizes = {**SUBJECTS, **FADING}[name], {"k_len": 60, "shared": shared}
    exact, wide = inputs(scheme, q_len, dtype=torch.float64, **sizes)
    expected = step(scheme, "reference", exact, wide, causal=True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        arrays, own = inputs(scheme, q_len, dtype=dtype, **sizes)
        half = torch.finfo(dtype).bits < 32
        if half:  # the bias is learned only in float32 and wider
            for array in (arrays["x"], *own.values()):
                array.requires_grad_(False)
        result = step(scheme, "folded", arrays, own, causal=True)
        tolerance = attention_bound(
            str(dtype).removeprefix("torch."), channels=HEAD_DIM + 8, keys=60
        )
        if dtype == torch.float32:
            # A kernel may add the channels in any order: a rounding of slope times position.
            tolerance += 2.0**-24 * 4 * 60
        assert_near(result[0].double(), expected[0], tolerance)
        for leaf in expected[1] if not half else "qkv":
            # A head's number is in all of its 3660 scores, a result in 60: errors of terms of both
            # signs grow like the root. Far keys count for twice their share and more.
            size = 1 if leaf in ("q", "k", "v") else 2.5 * math.sqrt(3660 / 60)
            found = result[1].get(leaf, torch.zeros(()))  # a key bias may not read an array
            assert_near(
                found.double().expand_as(expected[1][leaf]),
                expected[1][leaf],
                size * tolerance,
                leaf,
            )


@pytest.mark.parametrize("name", ["learned", "gated"])
def test_a_folded_bias_does_not_learn_in_half_precision(name):
    """The gradient of a slope is a sum over all pairs that cancels to a hundredth of its terms."""
    arrays, own = inputs(FADING[name], 20, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="the bias is learned"):
        step(FADING[name], "folded", arrays, own, causal=True)
    with torch.no_grad():
        options = {"scheme": FADING[name], "params": own, "causal": True}
        result = attention(arrays, implementation="folded", **options)
        expected = attention(arrays, implementation="reference", **options)
    assert_near(result.double(), expected.double(), ATTENTION_TOL["bfloat16"])


@long
@pytest.mark.parametrize("lengths", [(2000, 2000), (1, 2**16)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folded_bias_stays_exact_far_away(lengths, dtype):
    """Slope times position is 1400 and 46 000 here: 8 bits of it are off by 4, 16 bits by 1/2."""
    scheme = posenc.ALiBi(HEADS, slopes=[0.7, 0.3, 0.05, 0.011])
    q_len, k_len = lengths
    shapes = [(1, HEADS, n, 64) for n in (q_len, k_len, k_len)]
    q, k, v = (torch.tensor(normal(s, n)).to(getattr(torch, dtype)) for n, s in enumerate(shapes))
    wide = [a.double() for a in (q, k, v)]
    expected = posenc_torch.attention(*wide, scheme, causal=True, implementation="chunked")
    result = posenc_torch.attention(q, k, v, scheme, causal=True, implementation="folded")
    # Beyond 2000 keys the flattest bias is at -22, and a weight below a rounding. Products of half
    # precision are exact in float32, but three numbers of a slope times a position are added to
    # them, 8 channels in any order. Weights and the result are then rounded.
    bound = attention_bound("float32", channels=64 + 8, keys=2000)
    if dtype != "float32":
        bound += rounding_bound(8, 0.7 * k_len / 2) + rounding_bound(2, 1, dtype)
    assert_near(result.double(), expected, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_compiled_bias_is_rounded_as_a_conversion_rounds(dtype):
    values = torch.tensor(normal((1000,), 3)).double()
    values[:2] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])  # ties
    rounded = torch.compile(folded._rounded, fullgraph=True, backend="eager")(values, dtype)
    assert torch.equal(rounded, values.to(dtype).double())


def test_a_folded_bias_beyond_float16():
    """Slope times position over the root of D is 180 000 at last."""
    scheme, (q_len, k_len) = posenc.ALiBi(HEADS, slopes=[256.0, 8.0, 1.0, 0.1]), (1, 2000)
    arrays, _ = inputs(scheme, q_len, k_len=k_len, dtype=torch.float16, learns=False)
    exact = {name: a.double() for name, a in arrays.items()}
    expected = attention(exact, scheme=scheme, causal=True, implementation="reference")
    result = attention(arrays, scheme=scheme, causal=True, implementation="folded")
    assert_near(result.double(), expected, ATTENTION_TOL["float16"])


def test_a_folded_bias_calls_a_kernel_without_a_mask(monkeypatch):
    calls = []
    real = folded.scaled_dot_product_attention

    def spy(q, k, v, **options):
        calls.append((q.shape, v.shape, options))
        return real(q, k, v, **options)

    monkeypatch.setattr(folded, "scaled_dot_product_attention", spy)
    for dtype, width in ((torch.float32, HEAD_DIM + 8), (torch.bfloat16, HEAD_DIM + 8)):
        arrays, _ = inputs(STEEP, 20, dtype=dtype, learns=False)
        attention(arrays, scheme=STEEP, causal=True, implementation="folded")
        (q_shape, v_shape, options) = calls.pop()
        assert q_shape[3] == v_shape[3] == width
        assert options == {"is_causal": True, "scale": STEEP.scale(HEAD_DIM)}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("nope", {"causal": True}, "has no bias"),
        ("alibi", {}, "only under a causal mask"),
        ("t5", {"causal": True}, "declares no key_bias"),
        ("alibi", {"causal": True, "window": 5}, "no window"),
        ("alibi", {"causal": True, "scale": -1.0}, "a scale above 0"),
    ],
)
def test_a_bias_that_cannot_be_folded(name, options, reason):
    q = torch.zeros(1, HEADS, 8, HEAD_DIM)
    scheme = SUBJECTS[name]
    with pytest.raises(NotImplementedError, match=reason):
        posenc_torch.attention(
            q, q, q, scheme, params_of(scheme), implementation="folded", **options
        )


def test_skip_blocks_is_a_flag():
    q = torch.zeros(1, HEADS, 8, HEAD_DIM)
    with pytest.raises(TypeError, match="skip_blocks"):
        posenc_torch.attention(q, q, q, STEEP, skip_blocks=np.ones(1))


def test_a_log_sum_exp_rounds_no_scaled_query():
    q, k, v = (torch.tensor(normal((1, 2, 16, 24), n)).bfloat16() for n in range(3))
    wide = posenc_torch.attention(
        q.double(),
        k.double(),
        v.double(),
        posenc.NoPE(),
        implementation="reference",
        return_lse=True,
    )[1]
    lse = posenc_torch.attention(q, k, v, posenc.NoPE(), implementation="chunked", return_lse=True)[
        1
    ]
    assert (lse - wide).abs().max() < 1e-5
