"""GRAPE-AP against its sums along paths, ALiBi's case, tokens that a mask hides, padding."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import ROUTES
from subjects import normal

import posenc
from posenc.schemes import GRAPEAP
from posenc.testing.tolerances import ATTENTION_TOL, FLOAT32_TOL, assert_near

HEADS, DIM, WIDTH, LENGTH, P = 2, 4, 3, 9, 4
SCHEME = GRAPEAP(HEADS, WIDTH, p_head_dim=P)
SLOPES = (2**-4, 2**-8)
FLOAT64 = 4 * ATTENTION_TOL["float64"]  # biases are sums of a row
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
X, PARAMS = normal((2, LENGTH, WIDTH), 4), {"w": 3 * normal((HEADS, P, WIDTH), 5)}
TOKENS = posenc.Tokens(x=X)
AT, ONE = np.arange(LENGTH), np.zeros(LENGTH, int)


def turned(p, at):
    """The authors' rotation, ``(x1 cos + x2 sin, x2 cos - x1 sin)``, of all pairs by ``at``."""
    first, second = p[: P // 2], p[P // 2 :]
    cos, sin = math.cos(at), math.sin(at)
    return np.concatenate([first * cos + second * sin, second * cos - first * sin])


def by_loop(pos=AT, seg=ONE, k=K, v=V, normalized="key", left=None):
    """The formula, one potential after the other, in float64."""
    out = np.zeros_like(Q)
    for b, h, i in np.ndindex(Q.shape[:3]):
        p = X[b] @ PARAMS["w"][h].T
        unit = p / np.sqrt(np.mean(p * p, axis=-1, keepdims=True) + 2**-23)
        of_query, g = (unit if normalized == "both" else p)[i], h // (HEADS // k.shape[1])
        least = -(10**6) if left is None else pos[i] - left
        seen = [t for t in range(LENGTH) if least <= pos[t] <= pos[i] and seg[t] == seg[i]]
        psi = {
            t: -SLOPES[h] * math.log1p(math.exp(-(of_query @ turned(unit[t], pos[t])) / P))
            for t in seen
        }
        weights = np.exp([
            Q[b, h, i] @ k[b, g, j] / math.sqrt(DIM)
            + sum(psi[t] for t in seen if pos[t] > pos[j])
            for j in seen
        ])  # fmt: skip
        out[b, h, i] = weights / weights.sum() @ v[b, g, seen]
    return out


CASES = ["in order", "shuffled", "packed", "ties", "grouped", "both", "window"]


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_formula(case):
    scheme, k, v, pos, seg, more = SCHEME, K, V, AT, ONE, {}
    if case == "shuffled":
        pos = np.random.default_rng(0).permutation(40)[:LENGTH] - 20
    if case == "packed":
        packed = posenc.positions.packed([3, 5, 1])
        pos, seg = packed.pos, packed.seg
    if case == "ties":
        pos = np.array([3, 1, 1, 0, 2, 3, 3, 0, 4])
    if case == "grouped":
        k, v = k[:, :1], v[:, :1]
    if case == "both":
        scheme = GRAPEAP(HEADS, WIDTH, p_head_dim=P, normalized="both")
    if case == "window":  # tokens before it are on no path
        more = {"window": 3}
    where = {"pos": pos, "seg": seg} if case in ("shuffled", "packed", "ties") else {}
    tokens = posenc.Tokens(x=X, **where)
    found = posenc.attention(Q, k, v, scheme, PARAMS, causal=True, tokens=tokens, **more)
    left = 2 if case == "window" else None
    assert_near(found, by_loop(pos, seg, k, v, scheme.normalized, left), FLOAT64, case)


def test_a_path_by_hand():
    """One head of slope 1/256, three tokens, ``p`` of the hidden state itself."""
    scheme, x = GRAPEAP(1, 2, p_head_dim=2), np.array([[[0, 0], [3, 3], [2, 0]]], np.float32)
    q = np.zeros((1, 1, 3, 2), np.float32)
    v = np.eye(3, dtype=np.float32)[None, None]
    params = {"w": np.eye(2, dtype=np.float32)[None]}
    found = posenc.attention(q, q, v, scheme, params, causal=True, tokens=posenc.Tokens(x=x))
    # Token 1 is (1, 1) in units, and cos 1 + sin 1 = 1.381773291 after its turn; token 2 is
    # (sqrt 2, 0), and sqrt 2 cos 2 = -0.588521279. Times (2, 0) / 2 of the query.
    psi = [-math.log1p(math.exp(-z)) / 256 for z in (1.381773291, -0.588521279)]
    row = np.exp([psi[0] + psi[1], psi[1], 0])
    assert_near(found[0, 0, 2], row / row.sum(), FLOAT32_TOL)


def test_without_p_it_is_alibi():
    found = posenc.attention(
        Q, K, V, SCHEME, {"w": np.zeros((HEADS, P, WIDTH))}, causal=True, tokens=TOKENS
    )
    alibi = posenc.ALiBi(HEADS, [math.log(2) * m for m in SLOPES])
    assert_near(found, posenc.attention(Q, K, V, alibi, causal=True), FLOAT64)


def test_later_keys_have_no_bias_and_are_on_no_path():
    """Of all keys, the last two after the query."""
    tokens, at = posenc.Tokens(x=X), slice(LENGTH - 3, LENGTH - 2)
    queries, keys = posenc.features(SCHEME, PARAMS, tokens)
    every = np.broadcast_to(np.eye(LENGTH), (2, HEADS, LENGTH, LENGTH))
    pos = posenc.Tokens(pos=AT).with_features(keys.features)
    found, seen = (
        posenc.attention(
            0 * Q[:, :, at], 0 * K, every, SCHEME, PARAMS, causal=causal, tokens=pos,
            queries=posenc.Tokens(pos=AT).with_features(queries.features)[at],
        )
        for causal in (False, True)
    )  # fmt: skip
    assert_near(found[..., -2:], found[..., -3:-2] + np.zeros(2), FLOAT64)  # as the query's own
    some = found[..., :-2]
    assert_near(some / some.sum(axis=-1, keepdims=True), seen[..., :-2], FLOAT64)


def test_moving_all_tokens_changes_it():
    """The authors turn by the position of one token alone."""
    there = posenc.Tokens(x=X, pos=AT + 1)
    here, moved = (
        posenc.attention(Q, K, V, SCHEME, PARAMS, causal=True, tokens=t) for t in (TOKENS, there)
    )
    assert abs(here - moved).max() > 1e-3
    assert_near(moved, by_loop(AT + 1), FLOAT64)


def test_padding_may_be_nan():
    valid = AT > 2
    junk = {n: np.where(valid[:, None], a, np.nan) for n, a in {"q": Q, "k": K, "v": V}.items()}
    x = np.where(valid[:, None], X, np.nan)
    tokens = posenc.Tokens(pos=AT, exists=valid, x=x)
    found = posenc.attention(**junk, scheme=SCHEME, params=PARAMS, causal=True, tokens=tokens)
    assert not np.any(found[:, :, :3])
    assert_near(found[:, :, 3:], by_loop(seg=np.where(valid, 0, 1))[:, :, 3:], FLOAT64)


@pytest.mark.parametrize("route", [r for r in ROUTES if r.id in ("torch-sdpa", "jax-xla")])
def test_others_say_why_they_cannot(route):
    tensors = {n: a.astype(np.float32) for n, a in {"q": Q, "k": K, "v": V}.items()}
    with pytest.raises(NotImplementedError, match="all tokens between its query and its key"):
        route.attend(SCHEME, tensors, posenc.init_params(SCHEME), tokens=TOKENS)


def test_first_values_and_wrong_options():
    w = posenc.init_params(GRAPEAP(8, 64))["w"]
    assert w.shape == (8, 8, 64)
    assert 0.9 < w.std() * 16 < 1.1  # 0.5 / sqrt(64)
    with pytest.raises(ValueError, match="p_head_dim must be even, got 3"):
        GRAPEAP(HEADS, WIDTH, p_head_dim=3)
    with pytest.raises(ValueError, match="unknown normalized 'query'; accepted: key, both"):
        GRAPEAP(HEADS, WIDTH, normalized="query")
