"""The reference against its definition in plain loops, and what it says about wrong calls."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cases import CASES, ONE_OF_EACH, STEERING, options_of, tensors_of
from frameworks import HAS
from sample import long, some
from subjects import SUBJECTS, normal, params_of

import posenc
from posenc import Tokens
from posenc.apply.feature_needs import has_features
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc.contract.params import Features, Params
from posenc.schemes import FoX
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM, Fading, Fence
from posenc.testing.tolerances import ATTENTION_TOL, rounding_bound

FLOAT64 = 2 * ATTENTION_TOL["float64"]  # either is rounded
# The result is rounded, and float32 sums, of less than a rounding.
FLOAT16 = rounding_bound(2, 1, "float16")


def sees(i, j, o):
    """Whether query (pos, seg) may see key (pos, seg)."""
    (qp, qs), (kp, ks) = i, j
    near = o.get("window") is None or abs(int(qp) - int(kp)) < o["window"]
    return qs == ks and near and not (o.get("causal") and kp > qp)


def whereabouts(length, k_len, batch, own, *, last=False):
    """Positions and segments ``(B, L)``; ``last``: of the last of the keys' tokens."""
    start = k_len - length
    pos = np.arange(start, k_len) if own.pos is None else own.pos[..., start if last else 0 :]
    seg = 0 if own.seg is None else own.seg[..., start if last else 0 :]
    return np.broadcast_to(pos, (batch, length)), np.broadcast_to(seg, (batch, length))


def loops(scheme, q, k, v, params, bias, scale, tokens, queries=None, **o):
    """Softmax attention, one query at a time; ``bias(b, h)`` is (Q, K)."""
    (B, H, Q, _), K = q.shape, k.shape[2]
    kp, ks = whereabouts(K, K, B, tokens)
    qp, qs = whereabouts(Q, K, B, queries or tokens, last=queries is None)
    out = np.zeros((B, H, Q, v.shape[3]))
    for b, h in np.ndindex(B, H):
        g, at = h // (H // k.shape[1]), {"params": params}
        qh = posenc.transform(scheme, q[b], qp[b], role="query", **at)[h]
        kh = posenc.transform(scheme, k[b], kp[b], role="key", **at)[g]
        for i in range(Q):
            some = [j for j in range(K) if sees((qp[b, i], qs[b, i]), (kp[b, j], ks[b, j]), o)]
            s = [qh[i] @ kh[j] * scale + bias(b, h, qp[b, i], kp[b, j]) for j in some]
            e = np.exp(np.asarray(s) - max(s, default=0)) if max(s, default=0) > -np.inf else []
            if len(e):
                out[b, h, i] = e @ v[b, g, some] / np.sum(e)
    return out


# Schemes of features, rows, sinks and regions have formulas of their own elsewhere.
PLAIN = [
    name
    for name in STEERING
    if not has_features(SUBJECTS[name])
    and SUBJECTS[name].axes == 1
    and not SUBJECTS[name].hooks() & {"sink", "regions", "channel_decay", "adjust_scores"}
]
SUMMED = [name for name in STEERING if isinstance(SUBJECTS[name], (FoX, Fading))]


# Each scheme meets half of the cases in the quick part, and each case half of the schemes.
HALF = [(s, c) for n, s in enumerate(PLAIN) for m, c in enumerate(CASES) if (n + m) % 2 == 0]


@pytest.mark.parametrize(("subject", "case"), some(product(PLAIN, CASES), HALF, long))
def test_the_reference_is_its_definition(subject, case):
    scheme, where = SUBJECTS[subject], CASES[case]
    tensors, params = tensors_of(scheme, where), params_of(scheme, dtype="float64")
    options = options_of(scheme, where)
    found = posenc.attention(**tensors, scheme=scheme, params=params, **options)
    low, high = -70, 70
    pos = np.arange(low, high)
    table = posenc.bias(scheme, pos, pos, params, dtype=np.float64)

    def bias(b, h, i, j):
        return 0.0 if table is None else table[h % table.shape[0], i - low, j - low]

    scale = options.pop("scale", scheme.scale(HEAD_DIM))
    expected = loops(scheme, **tensors, params=params, bias=bias, scale=scale, **options)
    assert_near(found, expected, FLOAT64)


def log_sigmoid(z):
    return -math.log1p(math.exp(-z))


@pytest.mark.parametrize("case", ["causal", "shuffled", "segments", "fewer-queries"])
@pytest.mark.parametrize("subject", SUMMED)
def test_gates_are_summed_in_the_order_of_positions(subject, case):
    scheme, where = SUBJECTS[subject], CASES[case]
    o, tensors = options_of(scheme, where), tensors_of(scheme, where)
    params, (q, k) = params_of(scheme, dtype="float64"), (tensors["q"], tensors["k"])
    found = posenc.attention(**tensors, scheme=scheme, params=params, **o)
    (B, _, Q, _), K, tokens = q.shape, k.shape[2], o["tokens"]
    pos, seg = whereabouts(K, K, B, tokens)
    x, sums = tokens.x, np.zeros((B, HEADS, K))
    for b, h, i in np.ndindex(sums.shape):
        for j in range(K):
            if pos[b, j] <= pos[b, i] and seg[b, j] == seg[b, i]:
                sums[b, h, i] += log_sigmoid(x[b, j] @ params["w"][h] + params["b"][h])
    for side in posenc.features(scheme, params, tokens):
        assert_near(side.features["c"], sums, FLOAT64)
        assert side.pos is tokens.pos
        assert side.x is tokens.x
    ready = Tokens(pos=tokens.pos, seg=tokens.seg, features={"c": sums})
    both = o | {"tokens": ready, "queries": ready[K - Q :]}
    again = posenc.attention(**tensors, scheme=scheme, params=params, **both)
    assert_near(found, again, FLOAT64)
    where_is = [{int(p): i for i, p in enumerate(row)} for row in pos]

    def bias(b, h, i, j):
        q, k = (sums[b, h, where_is[b][p]] for p in (i, j))
        read = Params({}, np.float64, Features({"c": q}, "query"), Features({"c": k}, "key"))
        return scheme.bias(i, j, params=read, xp=np)

    if case != "segments":  # there a position names no token
        scale = HEAD_DIM**-0.5
        expected = loops(scheme, **tensors, params=params, bias=bias, scale=scale, **o)
        assert_near(found, expected, FLOAT64)


def test_a_carry_continues_the_sum():
    scheme, x = SUBJECTS["fox"], normal((2, 9, HIDDEN_DIM), 0)
    params = params_of(scheme)
    whole = posenc.features(scheme, params, Tokens(x=x))[1].features["c"]
    carry = {"c": whole[:, :, 4]}
    for side in posenc.features(scheme, params, Tokens(x=x[:, 5:]), carry=carry):
        assert_near(side.features["c"], whole[:, :, 5:], FLOAT64)


def test_rows_that_see_nothing_are_zero():
    scheme = posenc.ALiBi(HEADS)
    q = normal((1, HEADS, 3, HEAD_DIM), 0)
    out = posenc.attention(
        q, q, q, scheme, causal=True,
        tokens=Tokens(pos=np.asarray([2, 9, 4])), queries=Tokens(pos=np.asarray([5, 1, 3])),
    )  # fmt: skip
    assert not np.any(out[:, :, 1])
    np.testing.assert_array_equal(out[:, :, 2], q[:, :, 0])


def test_a_bias_of_minus_infinity_masks():
    pos, q = np.asarray([0, 3, 100]), normal((1, HEADS, 3, HEAD_DIM), 0)
    scheme, params = Fence(reach=4), {"slope": np.zeros(HEADS)}
    out = posenc.attention(q, q, q, scheme, params, tokens=Tokens(pos=pos))
    np.testing.assert_array_equal(out[:, :, 2], q[:, :, 2])
    pair = posenc.attention(*[q[:, :, :2]] * 3, posenc.NoPE())
    assert_near(out[:, :, :2], pair, FLOAT64)
    at = {"tokens": Tokens(pos=pos), "queries": Tokens(pos=pos + 1000)}
    far = posenc.attention(q, q, q, scheme, params, **at)
    assert not np.any(far)


def test_the_ends_of_queries_and_keys_align():
    q, k = normal((1, HEADS, 2, HEAD_DIM), 0), normal((1, HEADS, 5, HEAD_DIM), 1)
    pos = {"tokens": Tokens(pos=np.arange(5)), "queries": Tokens(pos=np.asarray([3, 4]))}
    scheme = posenc.RoPE(HEAD_DIM)
    found = posenc.attention(q, k, k, scheme, causal=True)
    np.testing.assert_array_equal(found, posenc.attention(q, k, k, scheme, causal=True, **pos))


@pytest.mark.parametrize("hides", ["", "window", "exists"])
def test_queries_after_all_keys_need_no_causal_mask(hides):
    q, k = normal((1, 2, 2, 4), 0), normal((1, 2, 6, 4), 1)
    tokens = Tokens(pos=np.arange(6), exists=np.ones((1, 6), bool) if hides == "exists" else None)
    for q_pos in ([5, 7], [4, 7]):  # a key is after the query at 4
        queries = Tokens(pos=np.array(q_pos))
        window = 4 if hides == "window" else None
        given = Arguments(tokens=tokens, queries=queries, window=window)
        call = prepare(q, k, k, posenc.NoPE(), None, True, given)
        visible, wanted = call.visible(), tokens.pos <= queries.pos[:, None]
        if window:
            wanted = wanted & (queries.pos[:, None] - tokens.pos < window)
        assert (visible is None) == (not hides and q_pos[0] == 5)
        assert visible is None or np.array_equal(visible[0, 0], wanted)


def test_more_queries_than_keys_need_positions():
    q, k = normal((1, HEADS, 5, HEAD_DIM), 0), normal((1, HEADS, 2, HEAD_DIM), 1)
    with pytest.raises(ValueError, match="give pos of tokens and of queries"):
        posenc.attention(q, k, k, posenc.NoPE())
    pos = {"tokens": Tokens(pos=np.arange(2)), "queries": Tokens(pos=np.arange(5))}
    assert posenc.attention(q, k, k, posenc.NoPE(), **pos).shape == q.shape


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_scores_do_not_overflow(dtype):
    q = (300 * np.sign(normal((1, HEADS, 4, 64), 0))).astype(dtype)
    out = posenc.attention(q, q, q, posenc.NoPE())
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, q)


def test_half_precision_comes_back_as_it_went_in():
    q = normal((2, HEADS, 6, HEAD_DIM), 0)
    out = posenc.attention(*[q.astype(np.float16)] * 3, posenc.ALiBi(HEADS), causal=True)
    assert out.dtype == np.float16
    assert_near(out, posenc.attention(q, q, q, posenc.ALiBi(HEADS), causal=True), FLOAT16)


def test_a_float64_param_asks_for_float64():
    scheme, q = SUBJECTS["kerple_log"], normal((1, HEADS, 6, HEAD_DIM), 0, "float32")
    out = posenc.attention(q, q, q, scheme, params_of(scheme, dtype="float64"))
    assert out.dtype == np.float32
    wide = posenc.attention(*[q.astype(np.float64)] * 3, scheme, params_of(scheme))
    np.testing.assert_array_equal(out, wide.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_working_float_is_that_of_the_arguments(dtype):
    q = normal((1, HEADS, 3, HEAD_DIM), 0, dtype)
    call = prepare(q, q, q, posenc.T5Bias(HEADS), _t5())
    assert np.dtype(call.dtype) == ("float64" if dtype == "float64" else "float32")
    assert call.bias().dtype == call.dtype


def test_scale_replaces_that_of_the_scheme():
    q = normal((1, HEADS, 6, HEAD_DIM), 0)
    found = posenc.attention(q, q, q, posenc.T5Bias(HEADS, scaled=False), _t5(), scale=0.25)
    expected = posenc.attention(q * 0.25, q, q, posenc.T5Bias(HEADS, scaled=False), _t5())
    assert_near(found, expected, FLOAT64)


def _t5():
    return params_of(posenc.T5Bias(HEADS))


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
@pytest.mark.parametrize("subject", some(STEERING, ONE_OF_EACH, long))
def test_gradients_of_the_reference_equal_differences(subject):
    import torch

    scheme, where = SUBJECTS[subject], CASES["everything"]
    tensors, given = tensors_of(scheme, where), params_of(scheme, dtype="float64")
    options = options_of(scheme, where)
    sides = {n: options.pop(n) for n in ("tokens", "queries")}
    hidden = {f"{n}.x": side.x for n, side in sides.items() if side.x is not None}
    sides = {n: replace(side, x=None).map(torch.tensor) for n, side in sides.items()}
    named = tensors | hidden | {f"param:{name}": a for name, a in given.items()}
    leaves = {name: torch.tensor(a, requires_grad=True) for name, a in named.items()}

    def run(*values, **other):
        values = dict(zip(named, values, strict=True))
        params = {name: values.pop(f"param:{name}") for name in scheme.param_specs()}
        of = {n: replace(side, x=values.pop(f"{n}.x", None)) for n, side in sides.items()}
        return posenc.attention(**values, scheme=scheme, params=params, **of, **options | other)

    used = tuple(leaves.values())
    assert torch.autograd.gradcheck(run, used, fast_mode=True)
    # Without the mask too: a scheme may have params for later keys alone.
    seen = (run(*used), run(*used, causal=False))
    grads = torch.autograd.grad(sum(out.square().sum() for out in seen), used, allow_unused=True)
    for name, gradient in zip(named, grads, strict=True):
        if name.startswith("param:"):
            assert torch.any(gradient != 0), f"no gradient reaches {name}"
