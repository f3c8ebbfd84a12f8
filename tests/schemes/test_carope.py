"""CARoPE against a loop over tokens, and the RoPE that it starts as."""

from __future__ import annotations

import math

import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.schemes import CARoPE
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

HEADS, DIM, WIDTH, LENGTH = 2, 4, 6, 9
SCHEME = CARoPE(HEADS, DIM, WIDTH, base=100.0)
PARAMS = {name: normal(spec.shape, 5) for name, spec in SCHEME.param_specs().items()}
FLOAT64 = 4 * ATTENTION_TOL["float64"]
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
X = normal((2, LENGTH, WIDTH), 4)
TOKENS = posenc.Tokens(x=X)


def phases(x, pos, seg, params=PARAMS):
    """``phi (B, H, L, D/2)``, one token after the other."""
    phi = np.zeros((len(x), HEADS, len(pos), DIM // 2))
    b = params.get("b", np.zeros(HEADS))
    for n, h, i in np.ndindex(phi.shape[:3]):
        for t in range(len(pos)):
            if pos[t] <= pos[i] and seg[t] == seg[i]:
                f = 1 / (math.log(1 + math.exp(params["w"][h] @ x[n, t] + b[h])) + 1)
                phi[n, h, i] += [f**k for k in (1, 2)]
    return phi


def attended(phi, seen, layout="half"):
    pairs = (slice(0, 2), slice(2, 4)) if layout == "half" else (slice(0, 4, 2), slice(1, 4, 2))
    q, k = ((a[..., pairs[0]] + 1j * a[..., pairs[1]]) * np.exp(1j * phi) for a in (Q, K))
    scores = np.einsum("bhid,bhjd->bhij", q, np.conj(k)).real / np.sqrt(DIM)
    weights = np.where(seen, np.exp(scores), 0)
    return weights / weights.sum(axis=-1, keepdims=True) @ V


@pytest.mark.parametrize(
    ("case", "layout"),
    [("in order", "half"), ("in order", "interleaved"), ("shuffled", "half"), ("packed", "half")],
)
def test_it_is_the_formula(case, layout):
    pos, seg, where = np.arange(LENGTH), np.zeros(LENGTH, int), {}
    if case == "shuffled":
        pos = np.random.default_rng(0).permutation(40)[:LENGTH] - 20
        where = {"pos": pos}
    if case == "packed":  # the documents interleaved
        pos, seg = np.array([0, 0, 1, 1, 2, 2, 3, 4, 3]), np.array([0, 7, 7, 0, 0, 7, 7, 7, 0])
        where = {"pos": pos, "seg": seg}
    scheme = CARoPE(HEADS, DIM, WIDTH, base=100.0, layout=layout)
    found = posenc.attention(
        Q, K, V, scheme, PARAMS, causal=True, tokens=posenc.Tokens(x=X, **where)
    )
    seen = (pos[:, None] >= pos) & (seg[:, None] == seg)
    assert_near(found, attended(phases(X, pos, seg), seen, layout), FLOAT64, case)


def test_without_an_offset_it_is_the_printed_formula():
    scheme, params = CARoPE(HEADS, DIM, WIDTH, base=None), {"w": PARAMS["w"]}
    assert set(scheme.param_specs()) == {"w"}
    found = posenc.attention(Q, K, V, scheme, params, causal=True, tokens=TOKENS)
    pos, seg = np.arange(LENGTH), np.zeros(LENGTH, int)
    seen = pos[:, None] >= pos
    assert_near(found, attended(phases(X, pos, seg, params), seen), FLOAT64)


def test_numbers_by_hand():
    """softplus(ln(e - 1)) is 1, and softplus(ln(e^3 - 1)) is 3: ``f`` is 1/2, then 1/4."""
    logits = [math.log(math.e - 1), math.log(math.e**3 - 1)]
    x = np.asarray(logits).reshape(1, 2, 1)
    scheme, params = CARoPE(1, 6, 1, base=None), {"w": np.ones((1, 1))}
    phi = posenc.features(scheme, params, posenc.Tokens(x=x))[1].features["phi"]
    expected = [[1 / 2, 1 / 4, 1 / 8], [3 / 4, 5 / 16, 9 / 64]]
    np.testing.assert_allclose(phi[0, 0], expected, rtol=1e-14)


@pytest.mark.parametrize(("base", "step"), [(100.0, 0.1), (1e8, 1e-4), (None, 1 + math.log(2))])
def test_it_starts_as_rope(base, step):
    """The frequencies of RoPE but for its highest, or ``(1 + ln 2)**-k`` for ``k`` from 1."""
    scheme = CARoPE(HEADS, DIM, WIDTH, base=base)
    params = {name: a.astype(np.float64) for name, a in posenc.init_params(scheme).items()}
    phi = posenc.features(scheme, params, TOKENS)[1].features["phi"]
    f = 1 / step if base is None else step
    expected = np.arange(1, LENGTH + 1)[:, None] * np.asarray([f, f**2])
    np.testing.assert_allclose(phi, np.broadcast_to(expected, phi.shape), rtol=1e-6)


def test_large_logits_stay_finite():
    """``f`` goes to 1 and to ``1 / z``."""
    x = np.asarray([-1000.0, 1000.0]).reshape(1, 2, 1).astype(np.float32)
    params = {"w": np.ones((1, 1), np.float32)}
    found = posenc.features(CARoPE(1, 4, 1, base=None), params, posenc.Tokens(x=x))[1].features
    f = 1 / 1001
    np.testing.assert_allclose(found["phi"][0, 0], [[1, 1], [1 + f, 1 + f * f]], rtol=1e-6)


def test_cached_sums_go_on():
    whole = posenc.features(SCHEME, PARAMS, TOKENS)[1].features["phi"]
    needs = posenc.cache_needs(SCHEME)
    assert needs.x_before == 0
    assert set(needs.carry) == {"phi"}
    rest = posenc.features(
        SCHEME, PARAMS, posenc.Tokens(x=X[:, 5:]), carry={"phi": whole[:, :, 4]}
    )[1].features["phi"]  # fmt: skip
    assert_near(rest, whole[:, :, 5:], FLOAT64)


def test_sizes_and_first_values():
    scheme = posenc.make("carope", num_heads=8, head_dim=64)
    assert (scheme.hidden_dim, scheme.base) == (512, 10_000.0)
    assert not posenc.init_params(scheme)["w"].any()
    wide = posenc.init_params(CARoPE(8, 64, init_std=0.02))["w"]
    assert abs(wide.std() / 0.02 - 1) < 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CARoPE(2, 3), "head_dim must be even, got 3"),
        (lambda: CARoPE(2, 4, base=1.0), "base must be above 1, got 1.0"),
        (lambda: CARoPE(2, 4, init_std=-1.0), "init_std must be 0 or more, got -1.0"),
        (lambda: CARoPE(2, 4, hidden_dim=0), "hidden_dim must be at least 1, got 0"),
        (
            lambda: posenc.attention(Q, K[:, :1], V[:, :1], SCHEME, PARAMS, tokens=TOKENS),
            "CARoPE turns the keys of each query head by its own; repeat k and v",
        ),
        (
            lambda: posenc.attention(Q, K, V, SCHEME, PARAMS, tokens=posenc.Tokens(x=X[..., :4])),
            "width C=4",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
