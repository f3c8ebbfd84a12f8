"""GRAPE-A: golden numbers, what it shares with ALiBi, grouped queries, wrong vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import ROUTES
from subjects import normal

import posenc
from posenc.schemes import GRAPEA
from posenc.testing.tolerances import ATTENTION_TOL, FLOAT32_TOL, assert_near

HEADS, DIM, LENGTH = 4, 8, 12
SCHEME = GRAPEA(HEADS, DIM)
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
FROM_0 = {
    "tokens": posenc.Tokens(pos=np.arange(LENGTH)), "queries": posenc.Tokens(pos=np.zeros(1, int))
}  # fmt: skip
DRAWN = {"omega": normal((HEADS,), 3), "u": normal((HEADS, DIM), 4)}


def by_formula(params, k=K, v=V, pos=None, unit=True):
    """The authors' formula, one pair after the other, in float64."""
    pos, out = np.arange(LENGTH) if pos is None else pos, np.zeros_like(Q)
    for b, h in np.ndindex(Q.shape[:2]):
        g, u = h // (HEADS // k.shape[1]), params["u"][h]
        u = u / math.sqrt(u @ u) if unit else u
        w = 2.0 ** (-8 * (h + 1) / HEADS) * math.log1p(math.exp(params["omega"][h]))
        for i in range(LENGTH):
            weights = np.zeros(LENGTH)
            for j in range(LENGTH):
                gate = math.log1p(math.exp(u @ k[b, g, j] / math.sqrt(DIM)))
                score = Q[b, h, i] @ k[b, g, j] / math.sqrt(DIM) - (pos[i] - pos[j]) * w * gate
                weights[j] = math.exp(score) if pos[j] <= pos[i] else 0
            out[b, h, i] = weights / weights.sum() @ v[b, g]
    return out


def test_a_bias_by_hand():
    # Two heads have slopes 1/16 and 1/256. u = (3, 4) has the length 5, so u . k_0 / sqrt(2) is
    # (0.6 + 0.8) sqrt(2) / sqrt(2) = 1.4: a gate of 1.6204173; those of keys 1 and 2 are ln 2.
    # omega = 0 is ln 2 too: w = 0.0433217.
    k = np.zeros((1, 2, 3, 2), np.float32)
    k[:, :, 0] = math.sqrt(2)
    params = {"omega": np.float32([0, 0]), "u": np.float32([[3, 4], [1, 0]])}
    v = np.broadcast_to(np.eye(3, dtype=np.float32), (1, 2, 3, 3))
    found = posenc.attention(np.zeros_like(k), k, v, GRAPEA(2, 2), params, causal=True)[0, 0, 2]
    row = np.exp(
        [-2 * 0.04332169878499658 * 1.620417409918451, -0.04332169878499658 * 0.6931472, 0]
    )
    assert_near(found, row / row.sum(), FLOAT32_TOL)


@pytest.mark.parametrize("case", ["in order", "shuffled", "grouped", "u of any length"])
def test_it_is_the_formula(case):
    scheme, k, v, pos = SCHEME, K, V, None
    if case == "shuffled":
        pos = np.random.default_rng(0).permutation(40)[:LENGTH] - 20
    if case == "grouped":
        k, v = k[:, :2], v[:, :2]
    if case == "u of any length":
        scheme = GRAPEA(HEADS, DIM, u_l2_norm=False)
    tokens = posenc.Tokens(pos=pos)
    found = posenc.attention(Q, k, v, scheme, DRAWN, causal=True, tokens=tokens)
    expected = by_formula(DRAWN, k, v, pos, unit=scheme.u_l2_norm)
    assert_near(found, expected, ATTENTION_TOL["float64"], case)


def test_it_starts_as_alibi_times_a_gate():
    params = posenc.init_params(SCHEME, 1)
    assert_near(np.log1p(np.exp(params["omega"])), np.ones(HEADS), FLOAT32_TOL)
    assert 0.5 < params["u"].std() * math.sqrt(DIM) < 1.5
    # Where no key has a part along u, its gate is ln 2.
    unit = params["u"] / np.linalg.norm(params["u"], axis=1, keepdims=True)
    no_part = K - K @ unit[:, :, None] * unit[:, None, :]
    found = posenc.attention(Q, no_part, V, SCHEME, params, causal=True)
    slopes = [math.log(2) * m for m in (2**-2, 2**-4, 2**-6, 2**-8)]
    expected = posenc.attention(Q, no_part, V, posenc.ALiBi(HEADS, slopes), causal=True)
    assert_near(found, expected, ATTENTION_TOL["float32"])


def test_later_keys_have_no_bias():
    found = posenc.attention(Q[:, :, :1], K, V, SCHEME, DRAWN, **FROM_0)
    expected = posenc.attention(Q[:, :, :1], K, V, posenc.NoPE(), **FROM_0)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("route", [r for r in ROUTES if r.id == "torch-sdpa"])
def test_u_of_zero_has_a_gradient(route):
    params = {"omega": DRAWN["omega"], "u": np.zeros((HEADS, DIM))}
    given = {"q": Q[:1], "k": K[:1], "v": V[:1]}
    _, found = route.gradients(SCHEME, given, params, V[:1], causal=True)
    assert all(np.isfinite(gradient).all() for gradient in found.values())
    assert np.any(found["u"] != 0)


def test_wrong_vectors():
    q, k, v = (a[..., :4] for a in (Q, K, V))
    with pytest.raises(ValueError, match="k has 4 channels, the scheme head_dim=8"):
        posenc.attention(q, k, v, SCHEME, DRAWN, causal=True)
    with pytest.raises(TypeError, match="u_l2_norm must be True or False, got 1"):
        GRAPEA(HEADS, DIM, u_l2_norm=1)
