"""Selective RoPE against a loop over tokens, and the hidden states of earlier tokens."""

from __future__ import annotations

import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.attn.earlier import with_earlier
from posenc.schemes import FoX, SelectiveRoPE, Sum
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

HEADS, DIM, WIDTH, LENGTH = 2, 4, 6, 9
SCHEME = SelectiveRoPE(HEADS, DIM, WIDTH, rank=2, conv=3, base=100.0, temp_max=0.5)
PARAMS = {name: normal(spec.shape, 5) for name, spec in SCHEME.param_specs().items()}
FOX = FoX(HEADS, WIDTH)
FLOAT64 = 4 * ATTENTION_TOL["float64"]
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
X = normal((2, LENGTH, WIDTH), 4)
TOKENS = posenc.Tokens(x=X)


def angles(x, pos, seg, params=PARAMS, gate=None):
    """Angles ``(B, H, L, D/2)``, one token after the other."""
    sums = np.zeros((len(x), HEADS, len(pos), DIM // 2))
    for b, h in np.ndindex(len(x), HEADS):

        def phi(token, b=b, h=h):
            cut = x[b, token].reshape(HEADS, -1)[h]
            return params["w2"][h] @ params["w1"][h] @ (cut / np.sqrt(cut @ cut + 1e-6))

        for document in set(seg):
            own = [t for t in np.argsort(pos) if seg[t] == document]
            total = np.zeros(DIM // 2)
            for n, token in enumerate(own):
                for tap in range(3):
                    if n - 2 + tap >= 0:
                        step = params["conv"][h, :, tap] * phi(own[n - 2 + tap])
                        step = step * 0.5 * 100.0 ** -np.array([0, 0.5])
                        total = total + step * (1 if gate is None else gate[b, h, token])
                sums[b, h, token] = total
    return sums


def attended(angle, pos, seg, q=Q, k=K, v=V):
    turns = np.exp(1j * angle)
    q, k = ((a[..., : DIM // 2] + 1j * a[..., DIM // 2 :]) * turns for a in (q, k))
    scores = np.einsum("bhid,bhjd->bhij", q, np.conj(k)).real / np.sqrt(DIM)
    seen = (pos[:, None] >= pos) & (seg[:, None] == seg)
    weights = np.where(seen, np.exp(scores), 0)
    return weights / weights.sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize("case", ["in order", "shuffled", "packed"])
def test_it_is_the_formula(case):
    pos, seg, where = np.arange(LENGTH), np.zeros(LENGTH, int), {}
    if case == "shuffled":
        pos = np.random.default_rng(0).permutation(40)[:LENGTH] - 20
        where = {"pos": pos}
    if case == "packed":  # the documents interleaved
        pos, seg = np.array([0, 0, 1, 1, 2, 2, 3, 4, 3]), np.array([0, 7, 7, 0, 0, 7, 7, 7, 0])
        where = {"pos": pos, "seg": seg}
    given = posenc.Tokens(x=X, **where)
    found = posenc.attention(Q, K, V, SCHEME, PARAMS, causal=True, tokens=given)
    assert_near(found, attended(angles(X, pos, seg), pos, seg), FLOAT64, case)


def test_options():
    pos, seg = np.arange(LENGTH), np.zeros(LENGTH, int)
    scheme = SelectiveRoPE(HEADS, DIM, WIDTH, rank=2, conv=3, temp_grad=True, use_gate=True)
    params = {name: normal(spec.shape, n) for n, (name, spec) in
              enumerate(scheme.param_specs().items())}  # fmt: skip
    first = posenc.init_params(scheme)
    np.testing.assert_allclose(first["temperature"], [1, 500_000**-0.5], rtol=1e-7)
    params["temperature"] = 0.5 * 100.0 ** -np.array([0, 0.5])
    cut = X.reshape(2, LENGTH, HEADS, -1)
    unit = (cut / np.sqrt(np.sum(cut**2, axis=-1, keepdims=True) + 1e-6)).reshape(X.shape)
    gate = np.einsum("blc,hc->bhl", unit, params["gate_w"]) + params["gate_b"][:, None]
    found = posenc.attention(Q, K, V, scheme, params, causal=True, tokens=TOKENS)
    expected = angles(X, pos, seg, params, 1 / (1 + np.exp(-gate)))
    assert_near(found, attended(expected, pos, seg), FLOAT64)


@pytest.mark.parametrize("sizes", [(5, 4), (1, 1, 7)])
@pytest.mark.parametrize("scheme", [SCHEME, Sum(SCHEME, FOX)])
def test_features_go_on_from_a_part(scheme, sizes):
    """From the last sums and the last hidden states, of which there may be fewer than are read."""
    params = posenc.init_params(scheme)
    params = {name: a.astype(np.float64) for name, a in params.items()}
    needs = posenc.cache_needs(scheme)
    assert needs.x_before == 2
    whole = posenc.features(scheme, params, TOKENS)[1].features
    end, carry, before = 0, None, None
    for size in sizes:
        now = X[:, end : end + size]
        given = posenc.Tokens(x=now)
        found = posenc.features(scheme, params, given, carry=carry, x_before=before)[1].features
        for name, array in found.items():
            assert_near(array, whole[name][:, :, end : end + size], FLOAT64, name)
        carry = {name: found[name][:, :, -1] for name in needs.carry}
        before = np.concatenate([X[:, :0] if before is None else before, now], axis=1)[:, -2:]
        end += size


def test_parts_of_a_sum_see_their_own_tokens():
    scheme, own = Sum(FOX, SCHEME), posenc.init_params(FOX)
    params = {f"0_{name}": a for name, a in own.items()}
    params |= {f"1_{name}": a for name, a in PARAMS.items()}
    found, fox, rope = (
        posenc.features(each, of, TOKENS)[1].features
        for each, of in ((scheme, params), (FOX, own), (SCHEME, PARAMS))
    )
    assert_near(found["0_c"], fox["c"], FLOAT64)
    assert_near(found["1_angle"], rope["angle"], FLOAT64)


def test_earlier_tokens_with_padding_before():
    x, seg = np.arange(1.0, 6.0).reshape(1, 5, 1), np.array([-9, -9, 0, 0, 0])
    windows = with_earlier(x, 2, posenc.Tokens(np.array([0, 1, 0, 1, 2]), seg), xp=np)[0, :, :, 0]
    np.testing.assert_array_equal(windows, [[0, 0, 1], [0, 1, 2], [0, 0, 3], [0, 3, 4], [3, 4, 5]])


def test_one_angle_for_all_is_rope():
    """Hidden states that are all alike give RoPE at a learned pace, from the third token on."""
    x = np.broadcast_to(X[:, :1], X.shape)
    angle = posenc.features(SCHEME, PARAMS, posenc.Tokens(x=x))[1].features["angle"]
    steps = np.diff(angle, axis=2)[:, :, 2:]
    np.testing.assert_allclose(steps, np.broadcast_to(steps[:, :, :1], steps.shape), atol=1e-13)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SelectiveRoPE(2, 3), "head_dim must be even"),
        (lambda: SelectiveRoPE(4, 2, 6), "hidden_dim=6 must be a multiple of num_heads=4"),
        (lambda: SelectiveRoPE(2, 4, conv=0), "conv"),
        (
            lambda: posenc.attention(Q, K[:, :1], V[:, :1], SCHEME, PARAMS, tokens=TOKENS),
            "repeat k and v",
        ),
        (
            lambda: posenc.attention(Q, K, V, SCHEME, PARAMS, tokens=posenc.Tokens(x=X[..., :4])),
            "width C=4",
        ),
        (
            lambda: posenc.features(SCHEME, PARAMS, TOKENS, carry={"angle": X[:, 0]}),
            "carry is given without x_before",
        ),
        (
            lambda: posenc.features(SCHEME, PARAMS, TOKENS, x_before=X[:1, :2]),
            r"x_before must be \(B, n, C\) = \(2, n, 6\)",
        ),
        (
            lambda: posenc.features(
                SCHEME, PARAMS, posenc.Tokens(seg=np.zeros(LENGTH, int), x=X), x_before=X
            ),
            r"x_before is given with tokens\.seg.*leave out tokens\.seg",
        ),
        (
            lambda: posenc.features(FOX, posenc.init_params(FOX), TOKENS, x_before=X),
            "FoX reads hidden states of no earlier tokens",
        ),
    ],
)
def test_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_vectors_of_another_width():
    q, k, v = (a[..., :2] for a in (Q, K, V))
    with pytest.raises(ValueError, match="x has 2 channels, the scheme head_dim=4"):
        posenc.attention(q, k, v, SCHEME, PARAMS, causal=True, tokens=TOKENS)
