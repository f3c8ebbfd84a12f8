"""FlexAttention: what its compiler accepts, blocks, recompilations, and the public functions."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from cases import CASES, tensors_of
from frameworks_installed import require
from fuzzing import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st
from sample import exhaustive, long, some
from subjects import SUBJECTS, heads, normal, params_of

import posenc
from posenc import Mask, Tokens
from posenc.apply.bias import has_bias
from posenc.apply.feature_needs import has_features, reads_features, reads_hidden
from posenc.apply.shapes import positions_as_places
from posenc.attn.arguments import Arguments
from posenc.attn.implementations import Planned, Refusal
from posenc.attn.masks import normal as normal_form
from posenc.attn.negligible import negligible_blocks
from posenc.attn.prepare import prepare
from posenc.contract.protocol import Hook
from posenc.positions import packed, visible
from posenc.schemes import FIRE, ALiBi, Sum
from posenc.testing import AttentionCase, assert_near, frameworks
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM, Checkered
from posenc.testing.tolerances import ATTENTION_TOL, UNIT, attention_bound

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import flex_lint
import torch
from changing_calls import Watched, check, drawn, kind_of, same
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

import posenc_torch
from posenc_torch.flex import call_mask, programs, target
from posenc_torch.flex import implementation as flex
from posenc_torch.flex.block_mask import BLOCK, BlockMaskInputs, TokenIntegers, mask_keys
from posenc_torch.flex.float_positions import is_same_in_float32
from posenc_torch.flex.near_far import near_and_far
from posenc_torch.flex.params import repeatedly_read_arrays
from posenc_torch.flex.ranges import block_lists, lists_of_diagonals
from posenc_torch.flex.score_mod import DistanceBias, SchemeBias, scheme_key

FLOAT32 = ATTENTION_TOL["float32"]
TORCH = frameworks()["torch"]
BIASED = [
    name for name, scheme in SUBJECTS.items()
    if has_bias(scheme) and not scheme.hooks() & {"adjust_scores", "regions"} and name != "silent"
]  # fmt: skip
RELATIVE = [
    name for name in BIASED
    if SUBJECTS[name].relative and SUBJECTS[name].param_specs()
    and not reads_features(SUBJECTS[name]) and Hook.KEY_BIAS not in SUBJECTS[name].hooks()
]  # fmt: skip
# Of which score_mod gives all: it has no sink.
ONLY_BIASED = [name for name in BIASED if Hook.SINK not in SUBJECTS[name].hooks()]
ONE_OF_EACH = [*{type(SUBJECTS[name]): name for name in ONLY_BIASED}.values()]
# Compiled in earnest, for ten seconds each.
COMPILED = ["t5", "alibi", "fox+alibi", "shaw"]
UNCOMPILED = [name for name in BIASED if name not in COMPILED]
SEVERAL = "Using multiple indexing operations on the same tensor"
pinned = pytest.mark.skipif(
    flex_lint.version_mismatch() is not None, reason=str(flex_lint.version_mismatch())
)


def tensors(scheme, q_len, k_len=None, batch=2):
    count, k_len = heads(scheme), k_len or q_len
    shapes = [(batch, count, q_len, HEAD_DIM), *[(batch, count, k_len, HEAD_DIM)] * 2]
    result = [torch.tensor(normal(shape, n), dtype=torch.float32) for n, shape in enumerate(shapes)]
    x = torch.tensor(normal((batch, k_len, HIDDEN_DIM), 3), dtype=torch.float32)
    return result, x, {name: torch.tensor(a) for name, a in params_of(scheme).items()}


def attend(scheme, implementation, arrays, tokens=None, **options):
    (q, k, v), x, params = arrays
    tokens = replace(tokens or Tokens(), x=x)
    with torch.no_grad():
        return posenc_torch.attention(
            q, k, v, scheme, params, implementation=implementation, tokens=tokens, **options
        )


def prepared(q, k, v, scheme, params=None, causal=False, **options):
    return prepare(q, k, v, scheme, params, causal, Arguments(**options))


# Compiled


@long
@pytest.mark.parametrize("name", some(COMPILED, COMPILED) + some(UNCOMPILED, []))
@pytest.mark.parametrize("call", some(["packed", "window"], ["packed"]))
def test_the_compiled_kernel_equals_the_reference(name, call):
    scheme = SUBJECTS[name]
    torch._dynamo.reset()
    tokens = packed([200, 100]).map(torch.tensor)
    options = {"packed": {"tokens": tokens}, "window": {"window": 150}}[call]
    arrays = tensors(scheme, 300)
    result = attend(scheme, "flex", arrays, causal=True, **options)
    expected = attend(scheme, "reference", arrays, causal=True, **options)
    assert_near(result.numpy(), expected.numpy(), FLOAT32)


@long
@pytest.mark.parametrize("dim", [8, 16])
def test_what_lies_behind_the_keys_in_memory_reaches_no_row(dim):
    def followed_by_nan(shape, seed):
        count = int(np.prod(shape))
        memory = torch.full((count + 4096,), torch.nan)
        memory[:count] = torch.tensor(normal((count,), seed), dtype=torch.float32)
        return memory[:count].view(shape)

    torch._dynamo.reset()
    arrays = [followed_by_nan((1, 2, 40, dim), seed) for seed in range(3)], None, {}
    result = attend(posenc.NoPE(), "flex", arrays, causal=True)
    expected = attend(posenc.NoPE(), "reference", arrays, causal=True)
    assert_near(result.numpy(), expected.numpy(), FLOAT32)


# Options of callers, places, features and sinks


def drawn_options(seed, q_len, k_len, scheme):
    """Masks, caps, biases, windows, padding and places, some of each, as NumPy arrays."""
    rng = np.random.default_rng(seed)

    def pairs(values):
        shape = [int(rng.choice([1, size])) for size in (2, heads(scheme))]
        return values((*shape, q_len, k_len))

    def hiding(shape):
        bias = rng.standard_normal(shape).astype("float32")
        return np.where(rng.random(shape) < 0.2, np.float32(-np.inf), bias)

    edge = int(rng.integers(2, 20))
    every = {
        "bias": lambda: pairs(hiding),
        "mask": lambda: pairs(lambda shape: rng.random(shape) < 0.4),
        "softcap": lambda: float(rng.uniform(0.5, 3)),
        "scale": lambda: float(rng.uniform(0.2, 0.6)),
        "window": lambda: [(7, 2), (None, 3), (5, None), 6][int(rng.integers(4))],
    }
    options = {name: make() for name, make in every.items() if rng.random() < 0.5}
    if "mask" in options and rng.random() < 0.5:
        options["mask"] = lambda q, k: (k <= q) | (k < edge)
    if "window" in options and rng.random() < 0.5:
        window = posenc.window(options.pop("window"), first=int(rng.integers(0, 6)))
        options["mask"] = window & options["mask"] if "mask" in options else window
    options["causal"] = bool(rng.integers(2))
    shift, sides = 5 * np.arange(2)[:, None], {"tokens": {}, "queries": {}}
    lengths = {"tokens": k_len, "queries": q_len}
    for name, low, axes in (("pos", -3, 1), ("places", 0, scheme.axes)):
        if rng.random() < 0.4:
            for side, n in lengths.items():
                shape = (2, n) if axes == 1 else (2, n, axes)
                own = rng.integers(low, 40, shape)
                sides[side][name] = own + shift.reshape(2, *[1] * (len(shape) - 1))
    for side, n in lengths.items():
        if rng.random() < 0.5:
            sides[side]["exists"] = rng.random((2, n)) < 0.7
    if rng.random() < 0.3:  # the queries are the last of the tokens
        del sides["queries"]
    return options | {side: Tokens(**own) for side, own in sides.items()}


def both_ways(scheme, arrays, options):
    """Result and log-sum-exp, through FlexAttention's definition and by ours in float64."""
    (q, k, v), x, params = arrays
    options = dict(options)
    if reads_hidden(scheme):
        hidden = {"tokens": x.numpy(), "queries": x.numpy()[:, k.shape[2] - q.shape[2] :]}
        options.setdefault("tokens", Tokens())
        for side in hidden.keys() & options.keys():
            options[side] = replace(options[side], x=hidden[side])
    given = Arguments(**{n: o for n, o in options.items() if n != "causal"})
    causal = options["causal"]
    with torch.no_grad(), programs.uncompiled(), eagerly():
        own = given.map(torch.tensor)._replace(return_lse=True)._asdict()
        result = posenc_torch.attention(
            q, k, v, scheme, params, causal, implementation="flex", **own
        )
    wide = given.map(lambda a: a.astype("float64") if a.dtype == "float32" else a)
    own = wide._replace(return_lse=True)._asdict()
    params = {n: a.double().numpy() for n, a in params.items()}
    exact = (a.double().numpy() for a in (q, k, v))
    return result, posenc.attention(*exact, scheme, params, causal, **own)


NEW = [
    "nope", "alibi", "t5", "fence", "shaw", "deberta", "inkling", "transformer_xl", "streets",
    "fox", "fox+alibi", "rope+key-side", "sink", "sink-of-queries", "rerope",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "seed"),
    some([(name, 0) for name in NEW], [(name, 0) for name in ("shaw", "sink")], long)
    + some([(name, seed) for name in NEW for seed in range(1, 12)], []),
)
def test_options_of_callers_equal_the_reference(name, seed):
    scheme = SUBJECTS[name]
    q_len, k_len = [(33, 33), (20, 33)][seed % 2]
    arrays = tensors(scheme, q_len, k_len)
    options = drawn_options(100 * seed + NEW.index(name), q_len, k_len, scheme)
    if scheme.hooks() & {"regions"}:  # it has places and windows of its own
        options = {n: o for n, o in options.items() if n in ("causal", "mask", "bias", "softcap")}
    sides = {n: options[n] for n in ("tokens", "queries") if n in options}
    alone = any(side.pos is None and side.places is not None for side in sides.values())
    if alone and Hook.TRANSFORM in scheme.hooks():
        options |= {n: replace(side, places=None) for n, side in sides.items()}
    result, expected = both_ways(scheme, arrays, options)
    masked = np.isinf(expected[1])
    assert (np.isinf(result[1].numpy()) == masked).all()
    assert_near(result[0].numpy(), expected[0], FLOAT32)
    assert_near(np.where(masked, 0, result[1].numpy()), np.where(masked, 0, expected[1]), FLOAT32)


@long
def test_the_compiled_kernel_takes_options_of_callers():
    torch._dynamo.reset()
    scheme, rng = SUBJECTS["t5"], np.random.default_rng(0)
    arrays = tensors(scheme, 150)
    given = {
        "bias": torch.tensor(rng.standard_normal((1, HEADS, 150, 150)), dtype=torch.float32),
        "mask": torch.tensor(rng.random((2, 1, 150, 150)) < 0.5),
        "softcap": 1.5,
    }
    for options in (given, {"mask": lambda q, k: (k <= q) | (k < 40), "causal": False}):
        result = attend(scheme, "flex", arrays, **options)
        expected = attend(scheme, "reference", arrays, **options)
        assert_near(result.numpy(), expected.numpy(), FLOAT32)


@long
def test_a_feature_of_one_row_or_one_head_serves_all():
    scheme, rng = SUBJECTS["shaw"], np.random.default_rng(0)
    (q, k, v), *_, params = tensors(scheme, 20)
    for shape in ((1, HEADS), (2, 1), (1, 1)):
        own = torch.tensor(rng.standard_normal((*shape, 20, 7)), dtype=torch.float32)
        with torch.no_grad(), programs.uncompiled(), eagerly():
            queries = Tokens(features={"r": own})
            result, expected = (
                posenc_torch.attention(
                    q, k, v, scheme, params, implementation=implementation, queries=queries
                )
                for implementation in ("flex", "reference")
            )
        assert_near(result.numpy(), expected.numpy(), FLOAT32)


def test_a_bias_reads_places_and_a_mask_reads_positions():
    scheme, arrays = SUBJECTS["alibi"], tensors(SUBJECTS["alibi"], 20)
    at = torch.arange(20) // 4
    options = {"causal": True, "window": 9, "tokens": Tokens(places=at)}
    with programs.uncompiled(), eagerly():
        result = attend(scheme, "flex", arrays, **options)
    assert_near(result.numpy(), attend(scheme, "reference", arrays, **options).numpy(), FLOAT32)


def test_a_fully_masked_row_has_no_log_sum_exp():
    (q, k, v), *_ = tensors(posenc.NoPE(), 6)
    where = {
        "tokens": Tokens(seg=torch.tensor([0, 0, 0, 1, 1, 1])),
        "queries": Tokens(seg=torch.tensor([0, 0, 0, 1, 1, 2])),
    }
    call = prepared(q, k, v, posenc.NoPE(), return_lse=True, **where)
    with torch.no_grad(), programs.uncompiled(), eagerly():
        out, lse = flex.flex(call)
    assert lse is not None
    rounded = lse.rounded()
    assert torch.isneginf(rounded[..., 5]).all()
    assert not out[..., 5, :].any()
    assert (rounded[..., :5] > -100).all()


def test_a_log_sum_exp_is_requested_where_it_is_needed():
    scheme = SUBJECTS["sink"]
    arrays = tensors(scheme, 8)
    with pytest.raises(NotImplementedError, match="sink of Sink needs a log-sum-exp, and "):
        attend(scheme, "flex", arrays)
    with pytest.raises(NotImplementedError, match="return_lse=True needs a log-sum-exp, and "):
        attend(SUBJECTS["alibi"], "flex", tensors(SUBJECTS["alibi"], 8), return_lse=True)
    assert flex.plan(on_a_gpu(SUBJECTS["alibi"], learns=True)).without_lse is None
    call = prepare(*arrays[0], SUBJECTS["alibi"])
    assert flex.arguments(call)["return_aux"] is None
    assert flex.arguments(replace(call, wants_lse=True))["return_aux"].lse


def test_a_score_is_scaled_and_capped_before_a_bias_and_in_float32():
    scheme = posenc.ALiBi(HEADS, slopes=[5.0, 1.0, 1.0, 1.0])
    (q, k, v), *_ = tensors(scheme, 4)
    added = torch.full((1, 1, 4, 4), 7.0)
    call = prepared(q, k, v, scheme, scale=0.25, softcap=2.0, bias=added)
    mod = flex.arguments(call)["score_mod"]
    at = map(torch.tensor, (0, 0, 3, 0))
    result = mod(torch.tensor(8.0, dtype=torch.bfloat16), *at)
    assert result.dtype == torch.float32
    assert float(result) == pytest.approx(2 * np.tanh(1) - 15 + 7)


STEEP = posenc.ALiBi(HEADS, slopes=[4.0, 0.2, 0.1, 0.03])
FOX_T5 = Sum(SUBJECTS["fox"], posenc.T5Bias(HEADS))


@long
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": True, "window": 700}, {}], ids=str
)
def test_negligible_blocks_are_not_computed(options):
    arrays = tensors(STEEP, 1300)
    torch._dynamo.reset()
    result, unskipped = (
        attend(STEEP, "flex", arrays, skip_blocks=skip, **options) for skip in (True, False)
    )
    expected = attend(STEEP, "reference", arrays, **options)
    two = 2 * attention_bound("float32", keys=1300)  # sums in another order round anew
    assert_near(result.numpy(), expected.numpy(), two)
    assert_near(
        result.numpy(), unskipped.numpy(), two + UNIT["float32"]
    )  # half a rounding is left out


def test_steep_heads_compute_few_blocks():
    (q, k, v), *_ = tensors(STEEP, 4096)
    call = prepare(q, k, v, STEEP, causal=True)
    mask, unskipped = (
        call_mask.block_mask_of(replace(call, skip_blocks=skip)) for skip in (True, False)
    )
    computed = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert computed.shape == (2, HEADS, 32)
    assert (computed[:, 0] <= 2).all()
    assert (computed.amax(dim=(0, 2)).diff() > 0).all()  # the flatter, the farther
    whole = unskipped.kv_num_blocks + unskipped.full_kv_num_blocks
    assert (whole[0, 0] == torch.arange(1, 33)).all()
    # Given positions: by key.
    at = Tokens(pos=torch.arange(4096))
    given = call_mask.block_mask_of(prepared(q, k, v, STEEP, causal=True, tokens=at))
    assert (given.kv_num_blocks + given.full_kv_num_blocks == computed).all()


@long
@pytest.mark.parametrize("name", some(["steep", "kerple_log", "fox+t5"], ["steep", "fox+t5"]))
def test_one_compiled_program_finds_negligible_blocks(name):
    """As on a GPU: one for every length, and the same blocks."""
    scheme = {"steep": STEEP, "fox+t5": FOX_T5}.get(name) or SUBJECTS[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(negligible_blocks, backend=counter, **programs.COMPILER)
    for length in (1300, 1500, 1700):
        (q, k, v), x, _ = tensors(scheme, length)
        tokens = Tokens(x=x) if reads_features(scheme) else None
        call = prepared(q, k, v, scheme, params_of(scheme), causal=True, tokens=tokens)
        count = -(-length // BLOCK)  # a CPU's mask has empty blocks beyond the end
        all_visible = call_mask.mask_inputs(call).visible_blocks()[1][:, :count, :count]
        result = run(call, BLOCK, all_visible=all_visible)
        assert (result == negligible_blocks(call, BLOCK, all_visible=all_visible)).all()
    assert counter.frame_count <= 2  # the first length as it is, all others as a symbol


@long
def test_a_cached_block_mask_serves_every_mode():
    (q, k, v), *_ = arrays = tensors(SUBJECTS["t5"], 300)
    call_mask.plain_mask.cache_clear()
    with programs.uncompiled(), eagerly():
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) for a in (q, k, v)]
            posenc_torch.attention(*fake, posenc.ALiBi(HEADS), causal=True, implementation="flex")
        with torch.inference_mode():
            posenc_torch.attention(q, k, v, posenc.ALiBi(HEADS), causal=True, implementation="flex")
        attend(SUBJECTS["t5"], "flex", arrays, causal=True)
    mask = call_mask.plain_mask(300, 300, posenc.causal, q.device, False, None)
    assert not any(a.is_inference() for a in mask.as_tuple() if isinstance(a, torch.Tensor))


def test_the_block_mask_of_plain_calls_is_made_once():
    (q, k, v), *_ = tensors(SUBJECTS["t5"], 1300)
    call = prepare(q, k, v, SUBJECTS["t5"], params_of(SUBJECTS["t5"]), causal=True)
    assert call_mask.block_mask_of(call) is call_mask.block_mask_of(replace(call, q=2 * q))
    assert call_mask.block_mask_of(call) is not call_mask.block_mask_of(replace(call, mask=Mask()))


@long
@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_the_compiled_kernel_keeps_differences_of_a_bias_far_away(dtype):
    scheme = SUBJECTS["alibi-far"]
    torch._dynamo.reset()
    tensors_there, x, params = tensors(scheme, 4, 6)
    arrays = [a.to(dtype) for a in tensors_there], x, params
    queries = Tokens(pos=torch.arange(1000, 1004))
    where = {"tokens": Tokens(pos=torch.arange(6)), "queries": queries}
    result = attend(scheme, "flex", arrays, **where)
    expected = attend(scheme, "reference", arrays, **where)
    # Weights and results of either are rounded once; what a score rounds to is the same.
    assert_near(result.float().numpy(), expected.float().numpy(), 2 * torch.finfo(dtype).eps)


class CompileCounter:
    """A compiler that compiles nothing, and counts the graphs that it gets."""

    def __init__(self):
        self.graphs = 0
        torch._dynamo.reset()
        self.entry = torch.compile(programs.kernel, backend=self, **programs.COMPILER)

    def __call__(self, graph, examples):
        self.graphs += 1
        return graph.forward

    def in_use(self):
        return programs.replace_kernel(self.entry)


@long
def test_decoding_compiles_once():
    counter = CompileCounter()
    with counter.in_use():
        for k_len in range(200, 211):
            attend(SUBJECTS["alibi"], "flex", tensors(SUBJECTS["alibi"], 1, k_len), causal=True)
    # The first length as it is, all others as a symbol.
    assert counter.graphs <= 2


def test_a_new_length_compiles_nothing_once_lengths_differ():
    counter = CompileCounter()
    with counter.in_use():
        for length in (200, 201, 333, 600, 601, 777, 900):
            attend(SUBJECTS["alibi"], "flex", tensors(SUBJECTS["alibi"], length), causal=True)
    # As it is; one block mask of two blocks, then of any number; padding or none.
    assert counter.graphs <= 4


@long
def test_new_caps_windows_and_first_tokens_compile_nothing():
    counter, arrays = CompileCounter(), tensors(SUBJECTS["alibi"], 200)
    with counter.in_use():
        for n in range(2, 6):
            options = {"softcap": n / 2, "mask": posenc.window((10 * n, n), first=n - 2)}
            attend(SUBJECTS["alibi"], "flex", arrays, causal=n % 2 == 0, **options)
            attend(SUBJECTS["alibi"], "flex", arrays, causal=n % 2 == 1, softcap=n + 1.0)
    assert counter.graphs == 1


def test_a_mask_of_the_same_code_and_numbers_compiles_once():
    counter, arrays = CompileCounter(), tensors(SUBJECTS["alibi"], 40)
    with counter.in_use():
        for edge in (5, 5, 5, 9, 9, 5):
            options = {"mask": lambda q, k: (k <= q) | (k < edge)}  # noqa: B023
            result = attend(SUBJECTS["alibi"], "flex", arrays, **options)
            expected = attend(SUBJECTS["alibi"], "reference", arrays, **options)
            assert_near(result.numpy(), expected.numpy(), FLOAT32)
    assert counter.graphs == 2
    # One cell of which the number changes: what was compiled for the first stays that.
    edge = 5
    mask = normal_form(Mask(function=lambda q, k: k < edge))
    first = mask_keys(mask)
    edge = 9
    second = mask_keys(mask)
    edge = 5
    assert first == mask_keys(mask) != second


@long
def test_more_schemes_than_a_compiler_usually_allows():
    counter, schemes = CompileCounter(), [posenc.ALiBi(n) for n in range(2, 11)]
    with counter.in_use():
        for scheme in schemes * 2:
            attend(scheme, "flex", tensors(scheme, 64), causal=True)
    assert counter.graphs <= len(schemes)


@long
def test_more_schemes_than_an_older_compiler_usually_allows(monkeypatch):
    """PyTorch 2.11 and 2.12 cannot count recompilations of one function apart."""
    torch._dynamo.reset()
    monkeypatch.setattr(programs, "ISOLATES", False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with programs.replace_kernel(programs.compile_with_limit(programs.kernel)):
        for heads_of in range(2, 12):
            scheme = posenc.ALiBi(heads_of)
            attend(scheme, "flex", tensors(scheme, 64), causal=True)
    assert "PyTorch 2.13" in flex.not_preferred(on_a_gpu(SUBJECTS["t5"], learns=False, length=1024))


# Blocks


def places(rng, length, batch, spread):
    shape = (batch, length) if batch else (length,)
    return torch.tensor(rng.integers(-spread, spread, shape), dtype=torch.int32)


@given(seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(max_examples=60)
def test_blocks_hold_what_is_visible(seed, data):
    rng = np.random.default_rng(seed)
    lengths = data.draw(st.tuples(*[st.integers(1, 3 * BLOCK)] * 2))
    batch = data.draw(st.sampled_from([0, 2]))
    spread = data.draw(st.sampled_from([1, 40, 1000]))
    q_pos, k_pos = (places(rng, n, batch, spread) for n in lengths)
    if data.draw(st.booleans()):  # in order, where blocks can be told apart
        q_pos, k_pos = q_pos.sort().values, k_pos.sort().values
    segments = [None, None]
    if data.draw(st.booleans()):
        segments = [places(rng, n, batch, 2).sort().values for n in lengths]
    causal = data.draw(st.booleans())
    window = data.draw(st.sampled_from([None, (0, 0), (6, 6), (99, None), (20, 3), (None, -5)]))
    first = data.draw(st.sampled_from([0, 1, 150]))
    tokens = [None if a is None else TokenIntegers.of(a) for a in (q_pos, k_pos, *segments)]
    left, right = window or (None, None)
    whole = Mask(causal=causal, left=left, right=right, first_tokens=first)
    any_visible, all_visible = BlockMaskInputs(*tokens, whole).visible_blocks()
    pairs = [a if a is None else torch.atleast_2d(a) for a in (q_pos, k_pos, *segments)]
    q, k, q_seg, k_seg = (
        a if a is None else a[:, :, None] if n % 2 == 0 else a[:, None, :]
        for n, a in enumerate(pairs)
    )
    mask = visible(q, k, q_seg, k_seg, causal=causal, window=window, first_tokens=first)
    mask = torch.ones_like(q - k, dtype=torch.bool) if mask is None else mask
    any_pairs, all_pairs = (to_pairs(blocks, mask.shape) for blocks in (any_visible, all_visible))
    assert torch.equal(mask, mask & any_pairs)
    assert torch.equal(all_pairs, all_pairs & mask)
    q_whole, k_whole = (n // BLOCK for n in lengths)
    assert not all_visible[:, q_whole:].any()
    assert not all_visible[:, :, k_whole:].any()
    q_count, k_count = (-(-n // BLOCK) for n in lengths)
    assert not any_visible[:, q_count:].any()
    assert not any_visible[:, :, k_count:].any()


def to_pairs(blocks, shape):
    """The value of its block for every pair of a query and a key."""
    wide = blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return wide[:, : shape[1], : shape[2]].expand(shape)


def test_a_block_at_the_edge_of_a_window_is_kept():
    near, far = torch.arange(BLOCK) + 99, torch.arange(BLOCK) - (BLOCK - 1)  # 99 apart at least
    for left, held in ((99, True), (98, False)):
        tokens = TokenIntegers.of(near), TokenIntegers.of(far), None, None
        mask = Mask(left=left, right=left)
        any_visible, _ = BlockMaskInputs(*tokens, mask).visible_blocks()
        assert bool(any_visible[0, 0, 0]) == held


def test_positions_of_one_row_serve_every_sequence():
    pos = 3 * torch.arange(6)[None]
    mod = posenc_torch.score_mod(posenc.ALiBi(HEADS), tokens=Tokens(pos=pos))
    first, sixth = (mod(torch.zeros(()), *map(torch.tensor, (b, 1, 4, 2))) for b in (0, 5))
    assert first == sixth != 0


def test_a_bias_is_added_in_float32_to_a_score_of_half_precision():
    mod = posenc_torch.score_mod(posenc.ALiBi(HEADS))
    at = map(torch.tensor, (0, 0, 1001, 0))
    assert mod(torch.zeros((), dtype=torch.bfloat16), *at).dtype == torch.float32


def test_a_mask_has_as_many_blocks_as_there_are():
    mask = posenc_torch.block_mask(1, 3 * BLOCK, causal=True)  # a kernel's own has room for more
    assert mask.kv_num_blocks.shape == mask.full_kv_num_blocks.shape == (1, 1, 1)
    assert mask.shape == (1, 1, 1, 3 * BLOCK)


def test_default_positions_leave_out_half_of_the_blocks():
    mask = posenc_torch.block_mask(8 * BLOCK, 8 * BLOCK, causal=True)
    assert int(mask.kv_num_blocks.sum()) == 8
    assert int(mask.full_kv_num_blocks.sum()) == 8 * 7 // 2
    packed_two = torch.repeat_interleave(torch.arange(2), 4 * BLOCK)
    mask = posenc_torch.block_mask(8 * BLOCK, 8 * BLOCK, tokens=Tokens(seg=packed_two))
    assert int(mask.full_kv_num_blocks.sum()) == 2 * 4 * 4
    assert not mask.kv_num_blocks.any()


def test_padding_is_left_out_and_places_are_not_read():
    exists, places = torch.arange(4 * BLOCK) < 2 * BLOCK, torch.zeros(4 * BLOCK, 2).long()
    for tokens, queries, computed in (
        (Tokens(exists=exists), None, [1, 2, 0, 0]),
        (Tokens(exists=exists), Tokens(), [1, 2, 2, 2]),
        (Tokens(places=places), None, [1, 2, 3, 4]),
    ):
        given = {"causal": True, "tokens": tokens, "queries": queries}
        mask = posenc_torch.block_mask(4 * BLOCK, 4 * BLOCK, **given)
        assert (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().tolist() == computed


def test_a_window_wider_than_any_distance_hides_nothing():
    mask = posenc_torch.block_mask(BLOCK, BLOCK, window=2**40)
    assert int(mask.full_kv_num_blocks.sum()) == 1


def test_a_block_mask_of_a_long_sequence_is_small():
    mask = posenc_torch.block_mask(2**17, 2**17, causal=True, window=4096)
    bytes_held = sum(a.numel() * a.element_size() for a in mask.as_tuple() if torch.is_tensor(a))
    assert bytes_held < 16 * 4 * 1024**2  # a few integers for each of 1024 * 1024 blocks
    assert int(mask.kv_num_blocks.max() + mask.full_kv_num_blocks.max()) <= 4096 // BLOCK + 2


# What a GPU would accept, without one


def features_of(scheme, length, params, batch=1):
    """Features and places of tokens; features require gradients."""
    if not has_features(scheme) and scheme.axes == 1:
        return {}, {}
    (q, k, _), x, _ = tensors(scheme, length, batch=batch)
    sides = posenc.features(scheme, params, Tokens(x=x), q=q, k=k)
    result = [
        {n: a.detach().clone().requires_grad_() for n, a in (side.features or {}).items()}
        for side in sides
    ]
    if scheme.axes > 1:
        places = positions_as_places(torch.arange(length), scheme.axes, xp=torch)[None, None]
        result = [{**side, "places": places} for side in result]
    return tuple(result)


def learning(scheme, seed=0):
    """The scheme's ``score_mod``; params and features require gradients."""
    params = {n: torch.tensor(a).requires_grad_() for n, a in params_of(scheme, seed).items()}
    query, key = features_of(scheme, 64, params)
    sides = {"tokens": Tokens(features=key), "queries": Tokens(features=query)}
    mod = posenc_torch.score_mod(scheme, params, **sides)
    return mod, params, (query, key)


@pinned
@pytest.mark.parametrize(
    "name",
    some(ONE_OF_EACH, ["kerple_log"], long)
    + some([name for name in ONLY_BIASED if name not in ONE_OF_EACH], []),
)
def test_a_gpu_takes_the_bias_unless_it_is_unsupported(name):
    scheme = SUBJECTS[name]
    mod, params, sides = learning(scheme)
    assert flex_lint.forward(mod, heads(scheme)) is None
    refused = flex_lint.backward(mod, heads(scheme))
    multiple = repeatedly_read_arrays(scheme, params, *sides)
    assert (refused is None) == (not multiple), refused
    assert refused is None or SEVERAL in refused


@long
@pinned
@pytest.mark.parametrize(
    "options", some([{"causal": True}, {"window": 9}], [{"causal": True}], long), ids=str
)
@pytest.mark.parametrize(
    "name",
    some(["parabola", "t5"], ["parabola"], long)
    + some([name for name in RELATIVE if name not in ("parabola", "t5")], []),
)
@pytest.mark.parametrize("q_len", some([64, 40], [40], long))
def test_a_gpu_takes_a_bias_by_distance(name, options, q_len):
    scheme = SUBJECTS[name]
    params = {n: torch.tensor(a).requires_grad_() for n, a in params_of(scheme).items()}
    q, k = (torch.zeros(1, heads(scheme), n, flex_lint.HEAD_DIM) for n in (q_len, 64))
    bias = flex._bias(prepared(q, k, k, scheme, params, **options))
    assert isinstance(bias, DistanceBias)
    assert flex_lint.forward(bias.score_mod, heads(scheme)) is None
    assert flex_lint.backward(bias.score_mod, heads(scheme)) is None


# Learned per-head scalars and tables, in the kernel.
COPIED = ["alibi-learned", "kerple_log", "t5", "checkered"]


def bias_in_the_kernel(scheme, params, length):
    """The bias of a call with given positions, where no table by distance serves."""
    at = Tokens(pos=torch.arange(length))
    q = torch.zeros(1, heads(scheme), length, flex_lint.HEAD_DIM)
    return flex._bias(prepared(q, q, q, scheme, params, tokens=at))


@long
@pinned
@pytest.mark.parametrize("name", COPIED)
def test_a_gpu_takes_copies_of_learned_arrays(name):
    scheme = SUBJECTS[name]
    params = {n: torch.tensor(a).requires_grad_() for n, a in params_of(scheme).items()}
    bias = bias_in_the_kernel(scheme, params, 64)
    assert set(bias.copied) == set(params)
    assert flex_lint.forward(bias.score_mod, heads(scheme)) is None
    assert flex_lint.backward(bias.score_mod, heads(scheme)) is None


@pytest.mark.parametrize("name", some(COPIED, ["kerple_log", "checkered"], long))
def test_copies_change_neither_a_bias_nor_its_gradients(name):
    scheme = SUBJECTS[name]
    params = {n: torch.tensor(a).double().requires_grad_() for n, a in params_of(scheme).items()}
    fixed = {n: a.detach() for n, a in params.items()}
    # Ends of blocks, and a second key of the same copy.
    index = torch.tensor([0, 1, BLOCK - 1, BLOCK, 8 * BLOCK, 8 * BLOCK + 5, 2047])
    at = torch.meshgrid(torch.zeros(1).long(), torch.arange(HEADS), index, index, indexing="ij")
    scores = torch.zeros(at[0].shape, dtype=torch.float64)
    bias, plain = (bias_in_the_kernel(scheme, own, 2048) for own in (params, fixed))
    assert not plain.copied
    values = bias.score_mod(scores, *at)
    assert torch.equal(values, plain.score_mod(scores, *at))
    weights = torch.tensor(normal(values.shape, 0))
    copies = [bias.arrays[name] for name in params]
    results = torch.autograd.grad((weights * values).sum(), [*params.values(), *copies])
    dense = posenc.bias(scheme, index, index, params)
    expected = torch.autograd.grad((weights * dense).sum(), [*params.values()])
    for result, one in zip(results, expected, strict=False):
        assert_near(result.numpy(), one.numpy(), ATTENTION_TOL["float64"])
    # Scores of neighbouring keys add to different copies.
    for result in results[len(params) :]:
        count = result.shape[-1]
        assert count == (8 * BLOCK if result.ndim == 2 else BLOCK)
        used = result.reshape(-1, count).any(dim=0).nonzero()[:, 0]
        assert torch.equal(used, (index % count).unique())


def test_copies_are_of_what_a_bias_reads_and_a_call_learns():
    scheme = posenc.schemes.Sink(SUBJECTS["kerple_log"])  # its bias reads no sink
    params = {n: torch.tensor(a).requires_grad_() for n, a in params_of(scheme).items()}
    learned = bias_in_the_kernel(scheme, params, 4).copied
    assert len(learned) == 2 < len(params)
    params[learned[0]].requires_grad_(False)
    assert bias_in_the_kernel(scheme, params, 4).copied == learned[1:]
    with torch.no_grad():
        assert not bias_in_the_kernel(scheme, params, 4).copied


def test_learned_slopes_are_multiplied_and_tables_are_gathered():
    """At default positions, where both have a form by distance, and at given ones."""
    for name, form in (("alibi-learned", SchemeBias), ("kerple_log", DistanceBias)):
        scheme = SUBJECTS[name]
        params = {n: torch.tensor(a).requires_grad_() for n, a in params_of(scheme).items()}
        q = torch.zeros(1, HEADS, 4, HEAD_DIM)
        bias = flex._bias(prepare(q, q, q, scheme, params, causal=True))
        assert isinstance(bias, form)
        assert bias.gathers == (form is DistanceBias)
    for name, gathers in (("t5", True), ("kerple_log", False)):
        for learns in (True, False):
            scheme = SUBJECTS[name]
            params = {
                n: torch.tensor(a).requires_grad_(learns) for n, a in params_of(scheme).items()
            }
            assert bias_in_the_kernel(scheme, params, 4).gathers == gathers


@pinned
@pytest.mark.parametrize("dtype", some([torch.float16, torch.bfloat16], [], long))
def test_a_gpu_takes_a_bias_in_half_precision(dtype):
    mod, *_ = learning(SUBJECTS["kerple_log"])
    assert flex_lint.forward(mod, HEADS, dtype=dtype) is None
    assert flex_lint.backward(mod, HEADS, dtype=dtype) is None


class Twice(Checkered):
    """A learned table that is read twice per score."""

    def bias(self, q, k, *, params, xp):
        return params["cells"][q % 3, k % 5] - params["cells"][k % 3, q % 5]


@long
@pinned
def test_a_learned_array_read_twice_is_reported():
    scheme = Twice()
    mod, params, _ = learning(scheme)
    assert SEVERAL in flex_lint.backward(mod, HEADS)
    assert repeatedly_read_arrays(scheme, params) == ["cells"]
    own = params["cells"]

    def twice(score, b, h, i, j):
        return score + own[h, i % 3, 0] - own[h, j % 3, 0]

    assert SEVERAL in flex_lint.backward(twice, HEADS)


class FarAndNear(type(SUBJECTS["shaw"])):
    """A table of each query that is read twice per score."""

    def bias(self, q, k, *, params, xp):
        r = params.query["r"]
        return r[xp.clip(q - k, 0, 2 * self.max_distance)] + r[0]


@long
@pinned
def test_a_table_of_features_read_twice_is_reported():
    scheme = FarAndNear(HEAD_DIM, max_distance=3)
    mod, params, sides = learning(scheme)
    assert SEVERAL in flex_lint.backward(mod, HEADS)
    assert repeatedly_read_arrays(scheme, params, *sides) == ["feature r of the query"]
    wide = replace(scheme, head_dim=flex_lint.HEAD_DIM)
    assert "feature r of the query" in why_refused(on_a_gpu(wide, learns=True))
    wide = replace(SUBJECTS["shaw"], head_dim=flex_lint.HEAD_DIM)
    assert isinstance(flex.plan(on_a_gpu(wide, learns=True)), Planned)


@long
@pinned
def test_a_gpu_takes_caps_and_biases_of_callers():
    q = torch.zeros(1, HEADS, 64, flex_lint.HEAD_DIM)
    for shape in ((1, HEADS), (1, 1)):
        added = torch.zeros(*shape, 64, 64, requires_grad=True)
        call = prepared(q, q, q, SUBJECTS["alibi"], bias=added, softcap=2.0, scale=0.3)
        mod = flex.arguments(call)["score_mod"]
        assert flex_lint.forward(mod, HEADS) is None
        assert flex_lint.backward(mod, HEADS) is None


@long
@pinned
def test_the_lint_reports_what_no_kernel_supports():
    def summed(score, b, h, i, j):
        return score + torch.cos((i - j) * torch.arange(4.0)).sum()

    assert "Buffers cannot be created" in flex_lint.forward(summed, HEADS)
    rate = torch.tensor(0.3, requires_grad=True)
    assert flex_lint.backward(lambda score, b, h, i, j: score * rate, HEADS) is not None


class Alternating(type(SUBJECTS["parabola"])):
    """A number that heads share, chosen by position."""

    def bias(self, q, k, *, params, xp):
        return params["c"][(q + k) % 2] * (q - k)


class Summed(type(SUBJECTS["parabola"])):
    """All numbers that heads share, in one operation."""

    def bias(self, q, k, *, params, xp):
        return xp.sum(params["c"]) * (q - k)


NETWORKS = {
    "fire": FIRE(HEADS, hidden=3, init_len=20.5, offset=True),
    "parabola": SUBJECTS["parabola"],
    "sum": Sum(ALiBi(HEADS, learned=True), FIRE(HEADS, hidden=2, init_len=20.5)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_an_array_read_at_fixed_indices_is_one_array_per_index(name):
    scheme = NETWORKS[name]
    params = {n: torch.tensor(a).double().requires_grad_() for n, a in params_of(scheme).items()}
    fixed = {n: a.detach() for n, a in params.items()}
    index = torch.tensor([0, 1, 19, 40, 2047])
    at = torch.meshgrid(torch.zeros(1).long(), torch.arange(HEADS), index, index, indexing="ij")
    scores = torch.zeros(at[0].shape, dtype=torch.float64)
    bias, plain = (bias_in_the_kernel(scheme, own, 2048) for own in (params, fixed))
    assert set(bias.split) == set(params) - {"b2", "0_slopes"}
    assert not plain.split
    assert set(bias.copied) == set(params) & {"b2", "0_slopes"}
    values = bias.score_mod(scores, *at)
    assert torch.equal(values, plain.score_mod(scores, *at))
    weights = torch.tensor(normal(values.shape, 0))
    results = torch.autograd.grad((weights * values).sum(), [*params.values()])
    dense = posenc.bias(scheme, index, index, params)
    expected = torch.autograd.grad((weights * dense).sum(), [*params.values()])
    for result, one in zip(results, expected, strict=True):
        assert_near(result.numpy(), one.numpy(), ATTENTION_TOL["float64"])


@pinned
@pytest.mark.parametrize("name", some([*NETWORKS], [], long))
def test_a_gpu_takes_a_network(name):
    scheme = NETWORKS[name]
    params = {n: torch.tensor(a).requires_grad_() for n, a in params_of(scheme).items()}
    bias = bias_in_the_kernel(scheme, params, 64)
    assert flex_lint.backward(bias.score_mod, HEADS) is None


def test_a_network_learns_on_a_gpu_where_it_is_asked_for():
    small, large = NETWORKS["fire"], FIRE(HEADS)
    for scheme, learns in ((small, True), (large, True), (large, False)):
        call = on_a_gpu(scheme, learns=learns, length=4096)
        assert isinstance(flex.plan(call), Planned)
        why = flex.not_preferred(call)
        if scheme is large and learns:
            assert "98 learned numbers" in why
        else:
            assert why is None


@pytest.mark.parametrize("scheme", [Twice(), Alternating(), Summed()])
def test_a_bias_that_the_lint_rejects_is_unsupported_on_a_gpu(scheme):
    where = {"tokens": Tokens(pos=torch.arange(4))}
    call = on_a_gpu(scheme, learns=True, **where)
    assert "one read of each learned array or feature" in why_refused(call)
    assert isinstance(flex.plan(on_a_gpu(scheme, learns=False, **where)), Planned)
    assert isinstance(flex.plan(on_a_gpu(SUBJECTS["t5"], learns=True, **where)), Planned)
    # By distance every array is read once, and summed by autograd.
    assert isinstance(flex.plan(on_a_gpu(SUBJECTS["parabola"], learns=True)), Planned)


def why_refused(call):
    """Why ``flex`` cannot serve a call."""
    planned = flex.plan(call)
    assert isinstance(planned, Refusal)
    return planned.why


def on_a_gpu(scheme, *, learns, length=4, **where):
    """A call as from a GPU: q, k and v claim to be there, and have no values."""
    q = torch.zeros(1, HEADS, length, flex_lint.HEAD_DIM)
    params = {n: torch.tensor(a).requires_grad_(learns) for n, a in params_of(scheme).items()}
    call = prepared(q, q, q, scheme, params, **where)
    with FakeTensorMode():
        there = torch.empty(q.shape, device="cuda")
    return replace(call, q=there, k=there, v=there)


def test_two_gathered_tiles_are_smaller():
    """As tables of queries and of keys: with the options for one, an H200 spills registers."""

    def block(scheme, length):
        q = torch.zeros(1, HEADS, length, HEAD_DIM)
        params = {n: torch.tensor(a) for n, a in params_of(scheme).items()}
        call = prepare(q, q, q, scheme, params)
        with as_on_a_gpu():
            half = replace(call, q=call.q.bfloat16())
            return flex.arguments(half)["kernel_options"].get("fwd_BLOCK_M")

    assert block(SUBJECTS["deberta"], 128) == 64
    assert {block(SUBJECTS["deberta"], 32), block(SUBJECTS["shaw"], 128)} == {None}


def test_a_gpu_s_kernels_know_when_lengths_are_whole_blocks():
    def divisible(q_len, k_len):
        q, k = (torch.zeros(1, HEADS, n, 16) for n in (q_len, k_len))
        call = prepare(q, k, k, SUBJECTS["alibi"])
        assert flex.arguments(call)["kernel_options"] == {}
        with as_on_a_gpu():
            return flex.arguments(call)["kernel_options"].get("IS_DIVISIBLE")

    assert divisible(256, 256)
    assert divisible(128, 384)
    # Never False: then torch looks itself, inside a larger graph too.
    assert {divisible(q_len, k_len) for q_len, k_len in ((256, 300), (44, 256), (1, 1))} == {None}


@long
def test_a_gpu_s_kernels_are_two_for_all_lengths():
    counter = CompileCounter()
    with as_on_a_gpu(), counter.in_use():
        for length in (256, 384, 333, 512, 600, 640):
            q = torch.zeros(1, HEADS, length, 16)
            attend(SUBJECTS["alibi"], "flex", ((q, q, q), None, None), causal=True)
    # The first length as it is; then a symbol, for whole blocks or not.
    assert counter.graphs <= 3


def test_ranges_are_what_rows_and_columns_need():
    first = torch.tensor([[[0, 1, 0, 1, 4, 3, 6], [0, 0, 0, 0, 0, 0, 0]]], dtype=torch.int32)
    lists = block_lists(first)
    blocks = first.shape[-1]
    # Rows 1 and 4 also take what the row after them needs.
    monotone = torch.tensor([[0, 0, 0, 1, 3, 3, 6], [0] * blocks])
    index = torch.arange(blocks)
    needed = (index >= monotone[..., None]) & (index <= index[:, None])
    for head in range(2):
        for side, pairs in (("kv", needed[head]), ("q", needed[head].T)):
            computed = torch.zeros(blocks, blocks, dtype=torch.int)
            for name in (side, f"full_{side}"):
                numbers, starts = lists[f"{name}_num_blocks"], lists[f"{name}_indices"]
                for row, (number, start) in enumerate(
                    zip(numbers[0, head].tolist(), starts[0, head, :, 0].tolist(), strict=True)
                ):
                    assert 0 <= start < blocks  # it is loaded even if the number is 0
                    computed[row, start : start + number] += 1 if name == side else 2
            # Each needed block once, and partly visible on the diagonal alone.
            assert (computed == torch.where(index == index[:, None], 1, 2) * pairs).all()
    # PyTorch 2.11 reads full lists with strides of the others, and takes all as contiguous.
    for name, a in lists.items():
        assert a.is_contiguous()
        assert a.dtype == torch.int32
        assert a.shape == lists[name.removeprefix("full_")].shape


@pytest.mark.parametrize("diagonals", [(None, None), (-2, None), (None, 0), (None, -2), (None, -9)])
def test_ranges_of_diagonals_are_the_blocks_on_them(diagonals):
    blocks = 7
    index = torch.arange(blocks, dtype=torch.int32)
    lists = lists_of_diagonals(index, diagonals)
    first, end = diagonals[0], 1 if diagonals[1] is None else diagonals[1]
    diagonal = index - index[:, None]
    needed = (diagonal < end) & (diagonal >= (-blocks if first is None else first))
    for side, pairs in (("kv", needed), ("q", needed.T)):
        computed = torch.zeros(blocks, blocks, dtype=torch.int)
        for name in (side, f"full_{side}"):
            numbers, starts = lists[f"{name}_num_blocks"], lists[f"{name}_indices"]
            for row, (number, start) in enumerate(
                zip(numbers[0, 0].tolist(), starts[0, 0, :, 0].tolist(), strict=True)
            ):
                assert 0 <= start < blocks  # it is loaded even if the number is 0
                computed[row, start : start + number] += 1 if name == side else 2
        # Each block once, and partly visible on the main diagonal alone.
        assert (computed == torch.where(diagonal == 0, 1, 2) * pairs).all()
    assert all(a.is_contiguous() and a.dtype == torch.int32 for a in lists.values())


@pytest.mark.parametrize("lengths", [(20, 20), (7, 20)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_table_by_amount_is_the_bias_of_visible_pairs(lengths, causal):
    scheme = SUBJECTS["t5"]
    q, k = (torch.zeros(1, HEADS, n, 16) for n in lengths)
    params = {n: torch.tensor(normal(a.shape, 1)) for n, a in posenc.init_params(scheme).items()}
    call = prepare(q, k, k, scheme, params, causal=causal)
    bias = DistanceBias.by_amount(call)
    b, h, i, j = torch.meshgrid(*map(torch.arange, (1, HEADS, *lengths)), indexing="ij")
    values = bias.score_mod(torch.zeros(i.shape), b, h, i, j)
    at = call.query.pos[:, None] - call.key.pos
    expected = posenc.apply.bias.bias_tile(
        scheme, call.query.pos[None, None, :, None], call.key.pos[None, None, None, :],
        call.arrays, dtype=torch.float32, xp=call.xp,
    )  # fmt: skip
    visible = (at >= 0) | (not causal)
    assert torch.equal(values[..., visible], expected.expand(values.shape)[..., visible])
    # One size for each length: a formula of lengths would have no gradient in a larger graph.
    assert bias.table.shape == (HEADS, 2 - causal, lengths[1])


def test_ranges_compute_the_blocks_of_whole_lists():
    (q, k, v), *_ = tensors(STEEP, 1800)
    call = prepare(q, k, v, STEEP, causal=True)
    whole = call_mask.block_mask_of(call)
    with as_on_a_gpu():
        ranges, options = call_mask.block_mask_of(call), flex.arguments(call)["kernel_options"]
    assert options["BLOCKS_ARE_CONTIGUOUS"]
    for side in ("kv_num_blocks", "q_num_blocks"):
        of_lists, of_ranges = (
            getattr(mask, side) + getattr(mask, f"full_{side}") for mask in (whole, ranges)
        )
        assert (of_lists[..., : of_ranges.shape[-1]] == of_ranges).all()
    assert ranges.shape == (2, HEADS, 1800, 1800)


def test_a_gpu_makes_a_table_in_one_program(monkeypatch):
    scheme, traced = SUBJECTS["t5"], []
    q = torch.zeros(1, HEADS, 4200, 16)
    params = {n: torch.tensor(a) for n, a in params_of(scheme).items()}
    call = prepare(q, q, q, scheme, params, causal=True)
    with as_on_a_gpu():
        monkeypatch.setattr(
            programs, "compiled_once", lambda function: traced.append(function) or function
        )
        flex._bias(call)
        assert traced == [flex._distance_bias]
        with programs.uncompiled():
            flex._bias(call)
        assert len(traced) == 1


@long
def test_one_program_makes_tables_of_all_lengths(monkeypatch):
    scheme = SUBJECTS["t5"]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(flex._distance_bias, backend=counter, **programs.COMPILER)
    for length in (300, 500, 800):
        q = torch.zeros(1, HEADS, length, 16)
        params = {n: torch.tensor(a).requires_grad_() for n, a in params_of(scheme).items()}
        call = prepare(q, q, q, scheme, params, causal=True)
        with as_on_a_gpu():
            expected = flex._bias(call)
            monkeypatch.setattr(programs, "compiled_once", lambda function: run)
            tables = flex._bias(call).table, expected.table
        assert (tables[0] == tables[1]).all()
        (one,), (other,) = (
            torch.autograd.grad((table**2).sum(), [*params.values()]) for table in tables
        )
        torch.testing.assert_close(one, other)
    assert counter.frame_count <= 2  # the first length as it is, all others as a symbol


def test_near_and_far_blocks_are_contiguous():
    """What the kernels of both parts are told."""
    scheme = SUBJECTS["t5"]
    q = torch.zeros(1, HEADS, 4200, 16)
    params = {n: torch.tensor(a) for n, a in params_of(scheme).items()}
    with as_on_a_gpu():
        parts = near_and_far(prepare(q, q, q, scheme, params, causal=True))
        keywords = [flex.arguments(part.call, part.diagonals) for part in parts]
    assert len(keywords) == 2
    for keyword in keywords:
        assert keyword["kernel_options"]["BLOCKS_ARE_CONTIGUOUS"]
        for side in ("kv", "full_kv", "q", "full_q"):
            numbers = getattr(keyword["block_mask"], f"{side}_num_blocks")[0, 0]
            indices = getattr(keyword["block_mask"], f"{side}_indices")[0, 0]
            for number, row in zip(numbers.tolist(), indices, strict=True):
                assert (row[:number].diff() == 1).all()


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((300, 300), {"causal": False}),
        ((300, 300), {"window": 20}),
        ((300, 300), {"mask": lambda q, k: k < 5}),
        ((300, 300), {"tokens": Tokens(pos=torch.arange(300))}),
        ((300, 300), {"tokens": Tokens(seg=torch.arange(300))}),
        ((150, 300), {}),
        ((100, 100), {}),
    ],
)
def test_other_masks_are_whole_lists(lengths, options):
    q, k = (torch.zeros(1, HEADS, n, 16) for n in lengths)
    call = prepared(q, k, k, SUBJECTS["alibi"], **{"causal": True, **options})
    with as_on_a_gpu():
        keywords = flex.arguments(call)
    mask = keywords["block_mask"]
    if mask is None:  # one block of everything
        return
    assert not keywords["kernel_options"].get("BLOCKS_ARE_CONTIGUOUS")
    assert mask.kv_indices.shape[-1] == -(-lengths[1] // BLOCK)
    assert mask.kv_indices.stride() == mask.full_kv_indices.stride()
    assert mask.q_indices.stride() == mask.full_q_indices.stride()


INTEGER_BIASES = [
    lambda q, k: ((k - q) // 2).float(),
    lambda q, k: (q + k).float(),
    lambda q, k: ((q - k) * (q - k)).float(),
    lambda q, k: ((q - k) - k).float(),
    lambda q, k: torch.arange(9.0)[k],
    lambda q, k: (q - k).clamp(-2, 2).half(),
    lambda q, k: torch.where(k < 2**24 + 1, 0.0, 1.0),
    lambda q, k: (q - k).half(),
    lambda q, k: (3 * q - 3 * k).float(),
    lambda q, k: torch.arange(2.0)[(k < 3).to(k.dtype)],  # an index of the positions' dtype
    lambda q, k: ((k < 3).to(k.dtype) // 2).float(),
]
FLOAT_BIASES = [
    lambda q, k: -0.5 * (q - k).abs().float(),
    lambda q, k: torch.where((k > q) | (k == 3), 0.0, -((q - k).float() ** 2)),
    lambda q, k: torch.tensor([0.5]) * (k - q),
    lambda q, k: torch.zeros(1),
    lambda q, k: q.float() * k.float(),
]


@pytest.mark.parametrize("bias", INTEGER_BIASES)
def test_a_bias_that_computes_with_integers_gets_integers(bias):
    assert not is_same_in_float32(bias, torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("bias", FLOAT_BIASES)
def test_a_bias_of_a_difference_takes_float32(bias):
    assert is_same_in_float32(bias, torch.zeros(1, dtype=torch.int32))
    largest = torch.tensor([0, 1, 3, 2**24 - 1, 2**24], dtype=torch.int32)
    for q in largest:
        expected, result = (bias(a, b) for a, b in ((q, largest), (q.float(), largest.float())))
        assert (result == expected).all()


def test_default_positions_are_floats_on_a_gpu():
    q = torch.zeros(1, HEADS, 20, 16)

    def floats(name, **options):
        params = {n: torch.tensor(a) for n, a in params_of(SUBJECTS[name]).items()}
        call = prepared(q, q, q, SUBJECTS[name], params, **options)
        return flex._bias(call).float_positions

    assert not floats("alibi")
    with as_on_a_gpu():
        assert floats("alibi")
        hidden = Tokens(x=torch.zeros(1, 20, HIDDEN_DIM))
        assert floats("fox+alibi", tokens=hidden, causal=True)
        assert not floats("tide")
        for given in (Tokens(pos=torch.arange(20)), Tokens(places=torch.arange(20))):
            assert not floats("alibi", tokens=given)
        with FakeTensorMode():
            assert floats("alibi-far")


def test_transforms_are_refused_before_they_spoil_what_is_kept():
    q = torch.tensor(normal((1, HEADS, 2 * BLOCK, 16), 0), dtype=torch.float32)
    transforms = (
        lambda attend: torch.func.grad(lambda q: attend(q).sum())(q),
        lambda attend: torch.vmap(attend)(q[None]),
        lambda attend: torch.func.jvp(attend, (q,), (q,)),
    )

    def attend(q, implementation="flex"):
        alibi = posenc.ALiBi(HEADS)
        return posenc_torch.attention(q, q, q, alibi, causal=True, implementation=implementation)

    with as_on_a_gpu(), programs.uncompiled(), TORCH.precision_scope([]):
        for transform in transforms:
            with pytest.raises(NotImplementedError, match="has neither"):
                transform(attend)
        result = attend(q)
    assert_near(result.numpy(), attend(q, "reference").numpy(), FLOAT32)


@contextlib.contextmanager
def as_on_a_gpu():
    """Inside, calls get what a GPU's kernel gets: its arguments do not depend on the device."""
    call_mask.plain_mask.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "KINDS", ())
        patch.setattr(programs, "compiled_once", lambda function: function)
        yield
    call_mask.plain_mask.cache_clear()


def test_auto_on_a_gpu_takes_it_where_scores_are_many():
    for name in ("t5", "alibi", "parabola"):
        assert flex.not_preferred(on_a_gpu(SUBJECTS[name], learns=False, length=1024)) is None
        assert "few scores" in flex.not_preferred(on_a_gpu(SUBJECTS[name], learns=False))
    assert "no mask" in flex.not_preferred(on_a_gpu(SUBJECTS["nope"], learns=False, length=1024))


# The public functions score_mod and block_mask


@pytest.mark.parametrize(
    "name",
    some(ONLY_BIASED, ["alibi", "checkered"], long),
)
def test_a_score_mod_and_a_block_mask_are_attention(name):
    scheme = SUBJECTS[name]
    (q, k, v), x, params = arrays = tensors(scheme, 40)
    pos = torch.tensor(np.random.default_rng(0).permutation(40) - 7)
    queries, tokens = posenc.features(scheme, params, Tokens(pos=pos, x=x), q=q, k=k)
    q_at, k_at = (
        posenc.transform(scheme, a, pos, role=role, params=params, features=side.features)
        for a, role, side in ((q, "query", queries), (k, "key", tokens))
    )
    if scheme.axes > 1:
        places = positions_as_places(pos, scheme.axes, xp=torch)[None, None]
        queries, tokens = (
            side.with_features({**(side.features or {}), "places": places})
            for side in (queries, tokens)
        )
    options = {"causal": True, "mask": posenc.window((19, 5), first=3), "tokens": Tokens(pos=pos)}
    mod = posenc_torch.score_mod(scheme, params, tokens=tokens, queries=queries)
    mask = posenc_torch.block_mask(40, 40, **options)
    with eagerly():
        result = flex_attention(q_at, k_at, v, mod, mask, scale=scheme.scale(HEAD_DIM))
    expected = attend(scheme, "reference", arrays, **options)
    assert_near(result.numpy(), expected.numpy(), FLOAT32)


@contextlib.contextmanager
def eagerly():
    with TORCH.precision_scope([]):  # FlexAttention warns when it is not compiled
        yield


MORE = {Hook.ADJUST_SCORES, Hook.CHANNEL_DECAY, Hook.REGIONS, Hook.SINK}


@pytest.mark.parametrize("name", [n for n, s in SUBJECTS.items() if MORE & s.hooks()])
def test_score_mod_leaves_out_nothing_in_silence(name):
    """It would be attention without the scheme, or without its sink."""
    params = {n: torch.tensor(a) for n, a in params_of(SUBJECTS[name]).items()}
    with pytest.raises(NotImplementedError, match="score_mod adds a bias to a score, and"):
        posenc_torch.score_mod(SUBJECTS[name], params)


def test_indices_are_positions_by_default():
    scheme, arrays = SUBJECTS["alibi"], tensors(SUBJECTS["alibi"], 40)
    (q, k, v), *_ = arrays
    mask = posenc_torch.block_mask(40, 40, causal=True)
    with eagerly():
        result = flex_attention(q, k, v, posenc_torch.score_mod(scheme), mask)
    assert_near(result.numpy(), attend(scheme, "reference", arrays, causal=True).numpy(), FLOAT32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: posenc_torch.score_mod(posenc.ALiBi), TypeError, "scheme must be an instance"),
        (lambda: posenc_torch.score_mod(posenc.T5Bias(2)), ValueError, "params lacks 'table'"),
        (
            lambda: posenc_torch.score_mod(posenc.ALiBi(2), queries=Tokens(pos=torch.arange(3))),
            ValueError,
            "queries.pos is given without tokens.pos",
        ),
        (
            lambda: posenc_torch.score_mod(posenc.ALiBi(2), tokens=torch.arange(3)),
            TypeError,
            "tokens must be posenc.Tokens, got Tensor",
        ),
        (
            lambda: posenc_torch.score_mod(SUBJECTS["fox"], posenc.init_params(SUBJECTS["fox"])),
            ValueError,
            "the query has no feature 'c'; .* give tokens and queries with features",
        ),
        (
            lambda: posenc_torch.score_mod(
                posenc.ALiBi(2), queries=Tokens(features={"c": torch.zeros(1, 2, 3)})
            ),
            ValueError,
            "the bias of ALiBi reads no features of tokens: leave out queries.features",
        ),
        (
            lambda: posenc_torch.score_mod(
                SUBJECTS["fox"],
                posenc.init_params(SUBJECTS["fox"]),
                queries=Tokens(features={"c": torch.zeros(2, 3)}),
            ),
            ValueError,
            r"queries.features\['c'\] must be floating, \(B or 1, H or 1, L\) .*, got \(2, 3\)",
        ),
        (
            lambda: posenc_torch.block_mask(4, 4, mask=Mask(first_tokens=-1)),
            ValueError,
            "mask.first_tokens must be",
        ),
        (
            lambda: posenc_torch.block_mask(4, 4, mask=torch.ones(1, 1, 4, 4, dtype=bool)),
            ValueError,
            "mask must not be an array here",
        ),
        (lambda: posenc_torch.block_mask(5, 4), ValueError, "give pos of tokens and of queries"),
        (lambda: posenc_torch.block_mask(0, 4), ValueError, "q_len must be at least 1"),
        (lambda: posenc_torch.block_mask(4, 4, window=0), ValueError, "window must be at least 1"),
        (
            lambda: posenc_torch.block_mask(4, 4, queries=Tokens(seg=torch.arange(4))),
            ValueError,
            "queries.seg is given without tokens.seg",
        ),
        (
            lambda: posenc_torch.block_mask(
                4, 4, tokens=Tokens(seg=torch.arange(4)), queries=Tokens(seg=torch.arange(3))
            ),
            ValueError,
            "queries.seg has length 3, q has 4",
        ),
        (
            lambda: posenc_torch.block_mask(
                4, 4, tokens=Tokens(pos=torch.arange(4)), queries=Tokens(pos=torch.arange(3))
            ),
            ValueError,
            "queries.pos has length 3, q has 4",
        ),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Unsupported calls


def refusal(scheme=None, dtype=torch.float32, **changes):
    scheme = scheme or posenc.ALiBi(HEADS)
    q = torch.zeros(1, HEADS, 4, HEAD_DIM, dtype=dtype, **changes)
    with pytest.raises(NotImplementedError) as refused:
        posenc_torch.attention(q, q, q, scheme, posenc.init_params(scheme), implementation="flex")
    return str(refused.value)


def test_reasons():
    assert "no backward pass on a CPU" in refusal(requires_grad=True)
    assert "no float64" in refusal(dtype=torch.float64)
    assert "not tested on meta" in refusal(device="meta")


def test_auto_says_why_it_skips_flex():
    q = torch.zeros(1, HEADS, 4, HEAD_DIM)
    explanation = posenc_torch.explain(q, q, q, posenc.ALiBi(HEADS), causal=True)
    assert explanation["implementation"] == "sdpa"
    assert "on a CPU it compiles" in explanation["others"]["flex"]


@long
@pytest.mark.parametrize("name", ["alibi", "fence"])
def test_fully_masked_rows_are_zero_in_the_kernel(name):
    scheme, case = SUBJECTS[name], CASES["everything"]
    problem = AttentionCase(scheme, tensors_of(scheme, case), params_of(scheme), case.options)
    fully_masked = case.options["queries"].seg == 3
    torch._dynamo.reset()
    arrays = {n: torch.tensor(a, dtype=torch.float32) for n, a in problem.tensors.items()}
    options = {
        n: o.map(torch.tensor) if isinstance(o, Tokens) else o for n, o in case.options.items()
    }
    params = {n: torch.tensor(a) for n, a in problem.params.items()}
    result = posenc_torch.attention(
        **arrays, scheme=scheme, params=params, implementation="flex", **options
    )
    assert not result[:, :, fully_masked].any()
    expected = posenc_torch.attention(
        **arrays, scheme=scheme, params=params, implementation="reference", **options
    )
    assert_near(result.numpy(), expected.numpy(), FLOAT32)


@long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("scheme", [posenc.ALiBi(HEADS), posenc.T5Bias(HEADS)])
def test_a_module_compiles_whole(scheme, backend):
    position = posenc_torch.Position(scheme)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: position.attend(q, q, q, causal=True, implementation="flex"),
        fullgraph=True, backend=backend,
    )  # fmt: skip
    q = torch.tensor(normal((2, HEADS, 150, HEAD_DIM), 0), dtype=torch.float32)
    with (
        torch.no_grad(),
        programs.uncompiled() if backend == "aot_eager" else contextlib.nullcontext(),
    ):
        expected = position.attend(q, q, q, causal=True, implementation="reference")
        assert_near(compiled(q).numpy(), expected.numpy(), FLOAT32)


@pytest.mark.parametrize("backend", some(["eager", "aot_eager"], [], long))
def test_a_program_without_kernels_is_refused(backend):
    q = torch.zeros(1, HEADS, 20, HEAD_DIM)

    def attend(implementation):
        torch._dynamo.reset()
        return torch.compile(
            lambda q: posenc_torch.attention(
                q, q, q, SUBJECTS["alibi"], causal=True, implementation=implementation
            ),
            backend=backend,
        )(q)

    with pytest.raises(NotImplementedError, match=f"backend='{backend}'.*use backend='inductor'"):
        attend("flex")
    assert attend("auto").shape == q.shape


# Calls that change, in one process


@contextlib.contextmanager
def watched():
    """Inside, the library compiles with a backend that checks graphs instead of torch's."""
    torch._dynamo.reset()
    programs.compiled.cache_clear()
    result, whole = Watched(), torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(whole, backend=result))
        yield result
    programs.compiled.cache_clear()


# The first call as it is; then sizes that differ become symbols, of one axis or of all.
SYMBOLS = 3


@pytest.mark.parametrize(
    "count", [pytest.param(16, marks=long), pytest.param(300, marks=exhaustive)]
)
def test_kernels_capture_arrays_of_known_size_whatever_the_calls(count):
    rng, kinds = np.random.default_rng(0), set()
    few = [("fence", "fence-wide", "t5", "fox"), tuple(KINDS)][count > 16]
    with watched() as compiler:
        for _ in range(count):
            layout, filling = drawn(rng, few)
            if count == 16:  # kinds come again
                layout = same(layout, heads=4, kv_heads=4, dim=8, v_dim=8, pos="L", seg="")
                layout = same(layout, exists=("", ""))
                layout = same(layout, batch=2 + layout.batch % 3, q_len=layout.q_len + 1)
                layout = same(layout, k_len=layout.k_len + 1)
            check(layout, filling)
            kinds.add(kind_of(layout))
    assert compiler.graphs <= len(kinds) + SYMBOLS


@long
def test_a_larger_padded_size_compiles_again():
    scheme = SUBJECTS["alibi"]
    with watched() as compiler:
        for length in (20, 1100):  # keys
            at = Tokens(pos=torch.arange(length))
            attend(scheme, "flex", tensors(scheme, 20, length), causal=True, tokens=at)
    assert compiler.graphs == 2


@pytest.mark.parametrize(
    ("whole", "dynamic"),
    some([(True, None), (False, True), (True, True), (False, None)], [(True, None)]),
)
@long
@pytest.mark.parametrize("kind", some(KINDS, ["alibi"]))
def test_a_program_of_the_user_takes_changing_calls(kind, whole, dynamic):
    torch._dynamo.reset()
    compiler, rng = Watched(), np.random.default_rng(1)
    attend = torch.compile(
        posenc_torch.attention, backend=compiler, fullgraph=whole, dynamic=dynamic
    )
    for n in range(6):
        layout, filling = drawn(rng, (kind,))
        layout = same(layout, heads=4, kv_heads=2, dim=8, v_dim=8, pos="", seg="", causal=True)
        layout = same(layout, exists=("", ""), shared=True)
        q_len = 2 + layout.q_len
        layout = same(layout, batch=2 + n % 3, q_len=q_len, k_len=q_len + layout.k_len)
        layout = same(layout, mask=posenc.window(10 + 20 * n, first=1 + n))
        layout = same(layout, softcap=1.5 + n, scale=0.2 + n / 10)
        check(layout, filling, attend)
    # As it is, and with symbols; for a table of distances once more if it outgrows its padded size.
    assert compiler.graphs <= 3


@long
def test_a_program_of_the_user_takes_schemes_that_differ_in_a_number():
    torch._dynamo.reset()
    compiler, at = Watched(), Tokens(pos=torch.arange(20))
    whole = torch.compile(posenc_torch.attention, backend=compiler, fullgraph=True)
    for name in ("fence", "fence-wide"):
        scheme = SUBJECTS[name]
        arrays = tensors(scheme, 20)
        (q, k, v), _, params = arrays
        with torch.no_grad():
            result = whole(q, k, v, scheme, params, tokens=at, implementation="flex")
        assert_near(result.numpy(), attend(scheme, "reference", arrays).numpy(), FLOAT32)
    assert compiler.graphs == 2


@long
def test_another_window_or_head_count_compiles():
    """With torch's compiler: symbols for them gave C++ that does not compile."""
    torch._dynamo.reset()
    programs.compiled.cache_clear()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for heads_of, window, scale in ((6, None, None), (4, 9, 0.3), (4, 30, 0.25), (4, 5, 0.4)):
        scheme = posenc.ALiBi(heads_of)
        arrays = tensors(scheme, 20 + window if window else 20)
        options = {"causal": True, "window": window, "scale": scale}
        result = attend(scheme, "flex", arrays, **options)
        expected = attend(scheme, "reference", arrays, **options)
        assert_near(result.numpy(), expected.numpy(), FLOAT32)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert compiled <= 3  # one per head count; and the second again, for lengths as symbols


def test_nested_tensors_are_an_error():
    parts = [torch.zeros(n, HEADS, HEAD_DIM) for n in (5, 3)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    k = torch.zeros(2, HEADS, 5, HEAD_DIM)
    with pytest.raises(TypeError, match=r"q is a nested tensor, .*packed\(lengths\), or pad"):
        posenc_torch.attention(q, q, q, posenc.ALiBi(HEADS))
    with pytest.raises(TypeError, match="v is a nested tensor"):
        posenc_torch.attention(k, k, q, posenc.ALiBi(HEADS))


def test_threads_find_their_own_schemes():
    """A scheme's hash is Python code, during which other threads run."""

    @dataclass(frozen=True, eq=False)
    class Slow(posenc.PositionScheme):
        slope: float

        def __hash__(self):
            time.sleep(0.01)
            return 1

    schemes = [Slow(slope) for slope in (1.0, 2.0, 3.0, 4.0)]
    with ThreadPoolExecutor(len(schemes)) as pool:
        keys = list(pool.map(scheme_key, schemes))
    assert len(set(keys)) == len(schemes)
    assert keys == [scheme_key(scheme) for scheme in schemes]
