"""RePo against a loop over tokens, and RoPE at the positions that it chooses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.schemes import RePo
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

HEADS, DIM, WIDTH, LENGTH = 2, 4, 6, 9
SCHEME = RePo(HEADS, DIM, WIDTH, mid=3, base=100.0)
PARAMS = {name: normal(spec.shape, 5) for name, spec in SCHEME.param_specs().items()}
FLOAT64 = 4 * ATTENTION_TOL["float64"]
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
X = normal((2, LENGTH, WIDTH), 4)
TOKENS = posenc.Tokens(x=X)


def positions(x, params=PARAMS):
    """``z (B, H, L)``, one token after the other."""
    z = np.zeros((len(x), HEADS, x.shape[1]))
    for b, i in np.ndindex(*x.shape[:2]):
        gate = [float(w @ x[b, i]) for w in params["gate_map"]]
        content = [float(w @ x[b, i]) for w in params["content_map"]]
        r = [g / (1 + math.exp(-g)) * c for g, c in zip(gate, content, strict=True)]
        z[b, :, i] = params["final_map"] @ np.asarray(r)
    return z


def attended(z, seen, q=Q, k=K, v=V, layout="half"):
    turns = np.exp(1j * z[..., None] * 100.0 ** -np.asarray([0, 0.5]))
    pairs = (slice(0, 2), slice(2, 4)) if layout == "half" else (slice(0, 4, 2), slice(1, 4, 2))
    q, k = ((a[..., pairs[0]] + 1j * a[..., pairs[1]]) * turns for a in (q, k))
    scores = np.einsum("bhid,bhjd->bhij", q, np.conj(k)).real / np.sqrt(DIM)
    weights = np.where(seen, np.exp(scores), 0)
    return weights / weights.sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("case", ["in order", "shuffled", "packed"])
def test_it_is_the_formula(case, layout):
    pos, seg, where = np.arange(LENGTH), np.zeros(LENGTH, int), {}
    if case == "shuffled":  # positions steer the mask alone
        pos = np.random.default_rng(0).permutation(40)[:LENGTH] - 20
        where = {"pos": pos}
    if case == "packed":
        pos, seg = np.array([0, 0, 1, 1, 2, 2, 3, 4, 3]), np.array([0, 7, 7, 0, 0, 7, 7, 7, 0])
        where = {"pos": pos, "seg": seg}
    scheme = RePo(HEADS, DIM, WIDTH, mid=3, base=100.0, layout=layout)
    found = posenc.attention(
        Q, K, V, scheme, PARAMS, causal=True, tokens=posenc.Tokens(x=X, **where)
    )
    seen = (pos[:, None] >= pos) & (seg[:, None] == seg)
    assert_near(found, attended(positions(X), seen, layout=layout), FLOAT64, case)


def test_features_are_the_positions():
    query, key = posenc.features(SCHEME, PARAMS, TOKENS)
    assert_near(query.features["query_z"], positions(X), FLOAT64)
    assert_near(key.features["key_z"], positions(X), FLOAT64)


def test_numbers_by_hand():
    """One gate of 0 and content: swish(ln 3) = 0.75 ln 3, so ``z = 2 * 0.75 ln 3 * 5``."""
    params = {
        "gate_map": np.asarray([[math.log(3), 0.0]]), "content_map": np.asarray([[0.0, 5.0]]),
        "final_map": np.asarray([[2.0]]),
    }  # fmt: skip
    found = posenc.features(RePo(1, 2, 2), params, posenc.Tokens(x=np.ones((1, 1, 2))))[0]
    np.testing.assert_allclose(found.features["query_z"], [[[7.5 * math.log(3)]]], rtol=1e-14)


def test_whole_positions_are_those_of_rope():
    """Hidden states that make ``z = 0, 1, 2 ...``; swish of a large gate is the gate."""
    params = {
        "gate_map": np.asarray([[40.0, 0.0]]), "content_map": np.asarray([[0.0, 1 / 40]]),
        "final_map": np.ones((HEADS, 1)),
    }  # fmt: skip
    x = np.stack([np.ones(LENGTH), np.arange(LENGTH)], axis=-1)[None]
    scheme, rope = RePo(HEADS, DIM, 2, base=100.0), posenc.RoPE(DIM, base=100.0)
    found = posenc.attention(Q[:1], K[:1], V[:1], scheme, params, True, tokens=posenc.Tokens(x=x))
    assert_near(found, posenc.attention(Q[:1], K[:1], V[:1], rope, causal=True), FLOAT64)


def test_cached_keys_keep_their_positions():
    """Decoding gives what the whole sequence gives: no position depends on the others."""
    whole = posenc.attention(Q, K, V, SCHEME, PARAMS, causal=True, tokens=TOKENS)
    end = posenc.attention(Q[:, :, -2:], K, V, SCHEME, PARAMS, causal=True, tokens=TOKENS)
    assert_near(end, whole[:, :, -2:], FLOAT64)
    needs = posenc.cache_needs(SCHEME)
    assert not needs.carry
    assert needs.x_before == 0


def test_sizes_and_first_values():
    scheme = posenc.make("repo", num_heads=4, head_dim=16)
    assert (scheme.hidden_dim, scheme.mid) == (64, 8)
    assert RePo(2, 2).mid == 1
    wide = RePo(8, 64)
    for name, first in posenc.init_params(wide).items():
        assert abs(first.std() * math.sqrt(512) - 1) < 0.2, name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RePo(2, 3), "head_dim must be even"),
        (lambda: RePo(2, 4, mid=0), "mid must be at least 1, got 0"),
        (lambda: RePo(2, 4, hidden_dim=0), "hidden_dim must be at least 1, got 0"),
        (
            lambda: posenc.attention(Q, K[:, :1], V[:, :1], SCHEME, PARAMS, tokens=TOKENS),
            "RePo turns the keys of each query head by its own; repeat k and v",
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
