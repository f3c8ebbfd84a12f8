"""TRA against a loop over pairs and numbers of the authors' code; queries that keep no key."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import ROUTES
from subjects import normal

import posenc
from posenc.schemes import TRA, Sink, Sum
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

HEADS, DIM, WIDTH, LENGTH = 2, 4, 6, 9
SCHEME = TRA(HEADS, WIDTH)
PARAMS = {"w": normal((HEADS, WIDTH), 5), "b": np.asarray([0.5, -1.0])}
FLOAT64 = 4 * ATTENTION_TOL["float64"]  # either is rounded
X = normal((2, LENGTH, WIDTH), 4)


def vectors(heads=HEADS):
    return [normal((2, heads, LENGTH, DIM), seed) for seed in range(3)]


def by_loop(q, k, v, pos, seg, causal=True):
    """The formula for one query, one key at a time, in float64."""
    out = np.zeros_like(q)
    groups = q.shape[1] // k.shape[1]
    for b, h, i in np.ndindex(q.shape[:3]):
        z = PARAMS["w"][h] @ X[b, i] + PARAMS["b"][h]
        delta = -math.log(1 + math.exp(-z))
        s = {j: q[b, h, i] @ k[b, h // groups, j] / 2 for j in range(len(pos))
             if (pos[j] <= pos[i] or not causal) and seg[j] == seg[i]}  # fmt: skip
        kept = [j for j in s if s[j] > 0]
        n = {j: sum(pos[t] >= pos[j] for t in kept) for j in kept}
        weights = np.exp(np.asarray([s[j] + delta * n[j] for j in kept]))
        if kept:
            out[b, h, i] = weights / weights.sum() @ v[b, h // groups, kept]
    return out


@pytest.mark.parametrize("case", ["in order", "shuffled", "packed", "grouped", "both ways"])
def test_it_is_the_formula(case):
    q, k, v = vectors()
    pos, seg, where = np.arange(LENGTH), np.zeros(LENGTH, int), {}
    if case == "shuffled":
        pos = np.random.default_rng(0).permutation(40)[:LENGTH] - 20
        where = {"pos": pos}
    if case == "packed":  # the documents interleaved, with tokens at one position
        pos, seg = np.array([0, 0, 1, 1, 2, 2, 3, 3, 3]), np.array([0, 7, 7, 0, 0, 7, 7, 7, 0])
        where = {"pos": pos, "seg": seg}
    if case == "grouped":
        k, v = k[:, :1], v[:, :1]
    causal = case != "both ways"
    tokens = posenc.Tokens(x=X, **where)
    found = posenc.attention(q, k, v, SCHEME, PARAMS, causal, tokens=tokens)
    assert_near(found, by_loop(q, k, v, pos, seg, causal), FLOAT64, case)


def test_numbers_of_the_authors_code():
    """``TRA`` of their notebook in float64, its projections the identity, by torch 2.13."""
    x = np.sin(np.arange(1.0, 25.0) ** 2).reshape(1, 6, 4)
    params = {"w": np.cos(np.arange(1.0, 9.0)).reshape(2, 4), "b": np.asarray([0.5, -1.0])}
    v = np.swapaxes(x.reshape(1, 6, 2, 2), 1, 2)
    q = v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + 1e-6)  # their norm, without gains
    found = posenc.attention(q, q, v, TRA(2, 4), params, True, tokens=posenc.Tokens(x=x))
    expected = [
        [0.841470984807897, -0.756802495307928, 0.412118485241757, -0.287903316665065],
        [0.152564996291853, -0.92303051040423, -0.953752652759472, 0.920026038196791],
        [-0.518485689449715, -0.615053503108237, 0.864637097285707, -0.444568242015764],
        [-0.601999867677605, 0.939530055569931, -0.930094878004525, -0.999208034107063],
        [-0.0911830452937019, -0.598423835664919, 0.180306279785322, -0.847184720621299],
        [0.901850905232364, -0.0570458092302255, 0.659700487058842, -0.810499207118133],
    ]
    np.testing.assert_allclose(np.swapaxes(found, 1, 2).reshape(6, 4), expected, rtol=1e-12)


def test_a_query_may_keep_no_key():
    """Then its result is 0; a score of 0 is not above the threshold."""
    k, v = np.ones((1, 1, 4, 2)), np.ones((1, 1, 4, 2))
    q = np.asarray([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])[None, None]
    params = {"w": np.zeros((1, 1)), "b": np.zeros(1)}
    given = {"params": params, "causal": True, "tokens": posenc.Tokens(x=np.zeros((1, 4, 1)))}
    out, lse = posenc.attention(q, k, v, TRA(1, 1), return_lse=True, **given)
    np.testing.assert_array_equal(out[0, 0], [[0, 0], [0, 0], [1, 1], [0, 0]])
    np.testing.assert_array_equal(lse[0, 0, [0, 1, 3]], [-np.inf] * 3)
    # A half, a quarter and an eighth of exp(sqrt(2)).
    np.testing.assert_allclose(lse[0, 0, 2], math.sqrt(2) + math.log(7 / 8))
    sunk = posenc.attention(q, k, v, Sink(TRA(1, 1), learned=False), **given)
    total = 7 / 8 * math.exp(math.sqrt(2))
    np.testing.assert_allclose(sunk[0, 0, :, 0], [0, 0, total / (1 + total), 0])


def test_gradients_of_a_query_that_keeps_no_key_are_zero():
    torch = pytest.importorskip("torch")
    q, k, v = (np.array(a) for a in vectors())
    q[:, :, -1], k[...] = 1, -np.abs(k)  # the last query sees every key
    given = {"q": q, "k": k, "v": v, **PARAMS}
    leaves = {name: torch.tensor(a, requires_grad=True) for name, a in given.items()}
    q, k, v, *params = leaves.values()
    tokens = posenc.Tokens(x=torch.tensor(X))
    learned = dict(zip(PARAMS, params, strict=True))
    out = posenc.attention(q, k, v, SCHEME, learned, True, tokens=tokens)
    (out * out).sum().backward()
    assert not q.grad[:, :, -1].any()
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())
    assert leaves["w"].grad.any()


def test_beside_a_bias_and_a_rotation():
    """The threshold is that of rotated scores; a bias is added after them and reveals no key."""
    q, k, v = vectors()
    tokens, pos = posenc.Tokens(x=X), np.arange(LENGTH)
    own, alibi = {f"1_{n}": a for n, a in PARAMS.items()}, posenc.ALiBi(HEADS)
    found = posenc.attention(q, k, v, Sum(alibi, SCHEME), own, True, tokens=tokens)
    bias = posenc.bias(alibi, pos, pos, dtype=np.float64)[None]
    expected = posenc.attention(q, k, v, SCHEME, PARAMS, True, tokens=tokens, bias=bias)
    assert_near(found, expected, FLOAT64)
    rope = posenc.RoPE(DIM)
    turned = [posenc.transform(rope, a, pos, role="key") for a in (q, k)]
    found = posenc.attention(q, k, v, Sum(rope, SCHEME), own, True, tokens=tokens)
    assert_near(found, by_loop(*turned, v, pos, np.zeros(LENGTH, int)), FLOAT64)


@pytest.mark.parametrize("route", [r for r in ROUTES if r.id in ("torch-sdpa", "jax-xla")])
def test_others_say_why_they_cannot(route):
    q, k, v = (a.astype(np.float32) for a in vectors())
    params = {name: a.astype(np.float32) for name, a in PARAMS.items()}
    with pytest.raises(NotImplementedError, match="counts the later keys above the threshold"):
        route.attend(
            SCHEME, {"q": q, "k": k, "v": v}, params, tokens=posenc.Tokens(x=X.astype(np.float32))
        )


def test_first_values():
    first = posenc.init_params(posenc.make("tra", num_heads=8, head_dim=64))
    assert first["w"].shape == (8, 512)
    for array in first.values():
        assert 0 < np.abs(array).max() <= 512**-0.5
