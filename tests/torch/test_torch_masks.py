"""A bias as SDPA's mask in half precision: in float32 on a CPU, in the dtype of q on a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import HAS
from subjects import SUBJECTS, heads, normal, params_of

import posenc
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM, HEADS
from posenc.testing.tolerances import ATTENTION_TOL, attention_bound

if not HAS["torch"]:
    pytest.skip("torch is not installed", allow_module_level=True)

import array_api_compat.torch as xp
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import posenc_torch
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc_torch import attn_mask, sdpa
from posenc_torch.chunked import job, passes
from posenc_torch.chunked.job import Job
from posenc_torch.chunked.table import table_of
from posenc_torch.chunked.tensors import tensors_of

HALF = ("float16", "bfloat16")
MASKED = ("sdpa", "chunked")  # implementations whose masks are SDPA's


@pytest.fixture(params=["on_a_cpu", "on_a_gpu"])
def masks(request, monkeypatch):
    """Masks as on either device; the rest runs on a CPU."""
    if request.param == "on_a_gpu":
        for module in (attn_mask, sdpa, job, passes):
            monkeypatch.setattr(module, "mask_dtype", lambda q: q.dtype)


def tensors(scheme, q_len, k_len, dtype):
    """q, k and v that learn, of a dtype and in float64."""
    sizes = {"q": q_len, "k": k_len, "v": k_len}
    half = {
        name: torch.tensor(normal((2, heads(scheme), n, HEAD_DIM), seed)).to(getattr(torch, dtype))
        for seed, (name, n) in enumerate(sizes.items())
    }
    wide = {name: a.double() for name, a in half.items()}
    return tuple({n: a.requires_grad_() for n, a in arrays.items()} for arrays in (half, wide))


def attend(scheme, arrays, implementation, params=None, **options):
    return posenc_torch.attention(
        **arrays, scheme=scheme, params=params, implementation=implementation, **options
    )


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("hidden", [False, True], ids=["all_seen", "masked_keys"])
@pytest.mark.parametrize("implementation", MASKED)
def test_a_bias_far_away_keeps_its_differences(implementation, hidden, dtype):
    """Near 1000 numbers of bfloat16 differ by 4, and biases of neighbours by less than 1."""
    scheme = SUBJECTS["alibi-far"]
    half, wide = tensors(scheme, 4, 6, dtype)
    k_pos = np.asarray([*range(5), 2000 if hidden else 5])
    queries = posenc.Tokens(pos=np.arange(1000, 1004))
    where = {"tokens": posenc.Tokens(pos=k_pos), "queries": queries, "causal": hidden}
    expected = attend(scheme, wide, "reference", **where)
    found = attend(scheme, half, implementation, **where)
    assert_near(found.detach().double(), expected.detach(), 4 * ATTENTION_TOL[dtype])


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("implementation", MASKED)
def test_a_row_that_sees_nothing_has_finite_gradients(implementation, dtype):
    scheme = posenc.ALiBi(HEADS, slopes=[-0.5] * HEADS)  # biases of 2**19: float16 holds none
    half, _ = tensors(scheme, 2, 1, dtype)
    tokens = posenc.Tokens(pos=np.asarray([0]), seg=np.asarray([0]))
    queries = posenc.Tokens(pos=np.asarray([2**20, 2**20]), seg=np.asarray([0, 1]))
    out = attend(scheme, half, implementation, tokens=tokens, queries=queries)
    out.sum().backward()
    assert not out[:, :, 1].any()
    assert all(a.grad.isfinite().all() for a in half.values())


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("slopes", [[1.0, 0.5, 0.1, 0.0], [-8.0, -4.0, 4.0, 8.0]], ids=str)
def test_a_bias_that_falls_or_grows(slopes):
    """Rows that peak elsewhere than at their own key: half precision could not hold them."""
    scheme = posenc.ALiBi(HEADS, slopes=slopes)
    half, wide = tensors(scheme, 300, 300, "bfloat16")
    for causal in (True, False):
        expected = attend(scheme, wide, "reference", causal=causal)
        result = attend(scheme, half, "chunked", causal=causal)
        assert_near(result.detach().double(), expected.detach(), ATTENTION_TOL["bfloat16"])


@pytest.mark.parametrize("scheme", [posenc.T5Bias(HEADS), posenc.ALiBi(HEADS, learned=True)])
def test_a_learned_bias_gets_a_float32_gradient_on_a_cpu(scheme):
    length = 300
    half, wide = tensors(scheme, length, length, "bfloat16")
    d_out = torch.tensor(normal((2, HEADS, length, HEAD_DIM), 9)).bfloat16()
    gradients = []
    for arrays, implementation in ((wide, "reference"), (half, "chunked")):
        dtype = torch.float64 if implementation == "reference" else torch.float32
        params = {n: torch.tensor(a, dtype=dtype) for n, a in params_of(scheme).items()}
        leaves = [a.requires_grad_() for a in params.values()]
        out = attend(scheme, arrays, implementation, params, causal=True, skip_blocks=False)
        (gradient,) = torch.autograd.grad(out, leaves, d_out.to(out.dtype))
        gradients.append(gradient)
    # A number of a table is in many more scores than a result: errors grow like the root.
    bound = 2 * math.sqrt(length) * attention_bound("float32", keys=length)
    assert_near(gradients[1].double(), gradients[0], bound)


def test_parts_in_half_precision_build_no_mask_on_a_cpu():
    """One that peaks at its own key, and one that does not."""
    for scheme in (posenc.ALiBi(HEADS), posenc.T5Bias(HEADS)):
        half, _ = tensors(scheme, 300, 300, "bfloat16")
        params = {n: torch.tensor(a) for n, a in params_of(scheme).items()}
        call = prepare(**half, scheme=scheme, params=params, causal=True, xp=xp)
        own, _ = Job.of(call, tensors_of(call, table_of(call)))
        assert own.table_has_mask


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, (5, 2))], ids=str)
def test_parts_of_a_scheme_without_a_bias_build_no_mask(causal, window):
    half, _ = tensors(posenc.NoPE(), 300, 300, "bfloat16")
    given = Arguments(window=window)
    call = prepare(**half, scheme=posenc.NoPE(), causal=causal, given=given, xp=xp)
    own, _ = Job.of(call, tensors_of(call, table_of(call)))
    assert own.table_has_mask


def test_a_user_lets_sdpa_add_in_half_precision():
    """It then has no product of float32 weights and half-precision values (pytorch 161936)."""
    scheme = posenc.T5Bias(HEADS)
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with FakeTensorMode():  # as a compiler does
            q, table = torch.randn(1, HEADS, 8, HEAD_DIM).bfloat16(), torch.randn(HEADS, 32)
            arrays, params = dict.fromkeys("qkv", q), {"table": table.requires_grad_()}
            assert attend(scheme, arrays, "sdpa", params, causal=True).dtype == torch.bfloat16
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_a_result_may_be_changed_in_place(name):
    scheme = posenc.make(name, num_heads=2)
    params = {n: torch.tensor(a) for n, a in posenc.init_params(scheme).items()}
    q, k, v = (torch.tensor(normal((1, 2, 6, 4), n)).requires_grad_() for n in range(3))
    out = posenc_torch.attention(q, k, v, scheme, params, True)
    out.mul_(2).sum().backward()
    doubled = posenc_torch.attention(q, k, v, scheme, params, True) * 2
    expected = torch.autograd.grad(doubled.sum(), [q, k, v])
    for array, gradient in zip((q, k, v), expected, strict=True):
        assert torch.equal(array.grad, gradient)


def test_an_infinite_bias_of_hidden_pairs_changes_nothing():
    q, k, v = (torch.tensor(normal((1, 2, 6, 4), n)) for n in range(3))
    bias = torch.full((6, 6), torch.inf).triu(1)[None, None].expand(1, 2, 6, 6)
    bias = torch.where(bias.isnan(), 0.0, bias)
    call = (q, k, v, posenc.NoPE(), None, True)
    found = posenc_torch.attention(*call, bias=bias, implementation="sdpa")
    assert_near(found.numpy(), posenc_torch.attention(*call).numpy(), ATTENTION_TOL["float32"])


ADDED = {
    "padding of another library": torch.full((300, 1), torch.finfo(torch.float32).min / 2),
    "some rows": torch.where(torch.arange(300) > 200, -1e9, 0.0)[:, None],
    "each row": 1e5 * torch.tensor(normal((300, 1), 7)).float(),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("implementation", MASKED)
def test_a_number_added_to_rows_of_a_bias_changes_nothing(implementation, name, causal):
    """Results with and without gradients, and gradients; float32 holds no score beside it."""
    given = {n: normal((1, HEADS, 300, HEAD_DIM), seed) for seed, n in enumerate("qkv")}
    results = []
    for added in (torch.zeros(300, 1), ADDED[name]):
        arrays = {n: torch.tensor(a).float().requires_grad_() for n, a in given.items()}
        options = {"bias": added.expand(1, 1, 300, 300), "causal": causal}
        out = attend(posenc.NoPE(), arrays, implementation, **options)
        gradients = torch.autograd.grad(out, list(arrays.values()), torch.cos(out).detach())
        with torch.no_grad():
            again = attend(posenc.NoPE(), arrays, implementation, **options)
        results.append([out.detach(), again, *gradients])
    bound = 2 * attention_bound("float32", keys=300)
    for plain, shifted in zip(*results, strict=True):
        assert_near(shifted, plain, bound * max(1.0, float(plain.abs().max())))
