"""FlexAttention in near and far parts, with the arguments of a GPU's kernels and no compiler."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks_installed import require
from sample import long, some
from subjects import normal

import posenc
from posenc.schemes import Sink, Sum
from posenc.testing import assert_near, frameworks
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch.nn.attention import flex_attention as public

import posenc_torch
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc_torch.flex import call_mask, near_far, programs, target
from posenc_torch.flex import implementation as flex
from posenc_torch.flex.block_mask import BLOCK
from posenc_torch.flex.score_mod import DistanceBias

HEADS, DIM = 2, 16
T5 = posenc.T5Bias(HEADS, num_buckets=8, max_distance=20)
CASES = {
    "causal": (T5, (4 * BLOCK, 4 * BLOCK), {"causal": True}),
    "both-sides": (T5, (460, 460), {}),
    "fewer-queries": (T5, (130, 460), {"causal": True}),
    "window": (T5, (460, 460), {"causal": True, "window": 300}),
    "segments": (T5, (460, 460), {"tokens": posenc.Tokens(seg=np.arange(460) // 150)}),
    "sink": (Sink(T5, HEADS), (460, 460), {"causal": True}),
    "sum": (Sum(T5, posenc.T5Bias(HEADS, 4, 3)), (460, 460), {"causal": True}),
}


@pytest.fixture
def parts(monkeypatch):
    """The parts of each call, as on a GPU, and from few blocks on."""
    calls = []

    def recorded(*args):
        calls.append(near_far.near_and_far(*args))
        return calls[-1]

    call_mask.plain_mask.cache_clear()
    monkeypatch.setattr(target, "KINDS", ())
    monkeypatch.setattr(near_far, "MIN_BLOCKS", 2)
    monkeypatch.setattr(flex, "near_and_far", recorded)
    # Its definition has gradients on a CPU too.
    monkeypatch.setattr(public, "_validate_device", lambda *_: None)
    yield calls
    call_mask.plain_mask.cache_clear()


def results(scheme, lengths, options, implementation, dtype):
    """The result, the log-sum-exp and all gradients."""
    sizes = zip((lengths[0], lengths[1], lengths[1]), range(3), strict=True)
    qkv = [torch.tensor(normal((1, HEADS, n, DIM), seed), dtype=dtype) for n, seed in sizes]
    params = {n: torch.tensor(a).to(dtype) for n, a in posenc.init_params(scheme).items()}
    arrays = [a.requires_grad_() for a in (*qkv, *params.values())]
    given = {n: o.map(torch.tensor) if n == "tokens" else o for n, o in options.items()}
    out, lse = posenc_torch.attention(
        *qkv, scheme, params, implementation=implementation, return_lse=True, **given
    )
    # The log-sum-exp of a query without a key has no gradient.
    finite = torch.where(torch.isfinite(lse), lse, 0.0)
    d_out = torch.tensor(normal(out.shape, 9), dtype=dtype)
    total = (out * d_out).sum() + (finite * d_out[..., 0]).sum()
    return [out, finite], torch.autograd.grad(total, arrays)


# Torch traces the definition, and looks at .grad of the table.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", some(CASES, ["causal"], long))
def test_near_and_far_parts_are_attention(name, parts):
    with programs.uncompiled(), frameworks()["torch"].precision_scope([]):  # where it does not warn
        values, gradients = results(*CASES[name], "flex", torch.float32)
    (divided,) = parts
    assert len(divided) == (3 if not CASES[name][2].get("causal") else 2)
    expected, expected_gradients = results(*CASES[name], "reference", torch.float64)
    for value, right in zip(values, expected, strict=True):
        assert_near(value.detach().numpy(), right.detach().numpy(), ATTENTION_TOL["float32"])
    for n, (gradient, right) in enumerate(zip(gradients, expected_gradients, strict=True)):
        tolerance = ATTENTION_TOL["float32"] * (1 if n < 3 else REDUCTION_FACTOR)
        assert_near(gradient.numpy(), right.numpy(), tolerance)


@pytest.mark.parametrize("size", [1.0, 2.0**14, 2.0**100])
def test_shares_of_parts_add_up_to_one(size):
    """Also where a log-sum-exp is so large that it has no digits left for their number."""
    ones, logs = torch.ones(1, 1, 3, 4), torch.full((1, 1, 3), size)
    merged, _ = near_far.merge([ones, ones, ones], [logs, logs, logs])
    torch.testing.assert_close(merged, ones)


def test_parts_without_a_key_are_merged_to_nothing():
    out, lse = torch.zeros(1, 1, 3, 4), torch.full((1, 1, 3), -torch.inf)  # as a kernel has them
    outs, logs = zip(*[flex.split_lse((out, public.AuxOutput(lse=lse)))] * 2, strict=True)
    merged, _ = near_far.merge(outs, logs)
    torch.testing.assert_close(merged, out)


def test_far_keys_are_read_without_a_table(parts):
    q = torch.zeros(1, HEADS, 6 * BLOCK, DIM)
    call = prepare(q, q, q, T5, {"table": torch.zeros(HEADS, 8)}, causal=True)
    near, far = near_far.near_and_far(call)
    assert isinstance(flex._bias(near.call), DistanceBias)
    assert flex._bias(far.call) is None
    masks = [flex.arguments(part.call, part.diagonals)["block_mask"] for part in (near, far)]
    masked = [int(mask.kv_num_blocks.sum()) for mask in masks]
    whole = [int(mask.full_kv_num_blocks.sum()) for mask in masks]
    assert masked == [6, 0]
    assert whole == [5, 6 * 7 // 2 - 6 - 5]  # with those, each visible block once


def test_a_call_is_divided_only_where_it_saves(parts):
    def divided(scheme, length=6 * BLOCK, causal=False, **options):
        q = torch.zeros(1, HEADS, length, DIM)
        params = {n: torch.tensor(a) for n, a in posenc.init_params(scheme).items()}
        call = prepare(q, q, q, scheme, params, causal, Arguments(**options))
        return len(near_far.near_and_far(call))

    at = posenc.Tokens(pos=torch.arange(6 * BLOCK))
    assert divided(T5) == 3
    assert divided(T5, causal=True) == 2
    assert divided(T5, BLOCK) == 0
    assert divided(T5, 2 * BLOCK, causal=True) == 0  # all of them near
    assert divided(T5, tokens=at) == 0  # there is no table
    assert divided(T5, softcap=3.0) == 0
    assert divided(T5, window=BLOCK) == 0  # a window of few blocks has few far keys
    assert divided(T5, window=BLOCK + 1) == 3
    assert divided(T5, window=BLOCK + 1, causal=True) == 0
    assert divided(T5, window=2 * BLOCK, causal=True) == 2
    assert divided(posenc.ALiBi(HEADS)) == divided(posenc.NoPE()) == 0
    assert divided(Sum(T5, posenc.ALiBi(HEADS)), causal=True) == 0
