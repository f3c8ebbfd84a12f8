"""CoPE against a loop over pairs, in any order of tokens, and its memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from frameworks import ROUTES
from subjects import normal

import posenc
from posenc.schemes import CoPE, Sum
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

HEADS, DIM, LENGTH, NPOS = 2, 4, 9, 5
SCHEME = CoPE(DIM, npos=NPOS)
PARAMS = {"e": normal((NPOS, DIM), 5)}
FLOAT64 = 4 * ATTENTION_TOL["float64"]  # either is rounded, and gates are sums of a row


def vectors(length=LENGTH, heads=HEADS):
    return [normal((2, heads, length, DIM), seed) for seed in range(3)]


def by_loop(q, k, v, pos, seg, e=PARAMS["e"]):
    """The formula for one query, one key at a time, in float64."""
    out, scale = np.zeros_like(q), DIM**-0.5
    groups = q.shape[1] // k.shape[1]
    for b, h, i in np.ndindex(q.shape[:3]):
        seen = [j for j in range(len(pos)) if pos[j] <= pos[i] and seg[j] == seg[i]]
        s = {j: scale * q[b, h, i] @ k[b, h // groups, j] for j in seen}
        for j in list(s):
            p = sum(1 / (1 + np.exp(-scale * q[b, h, i] @ k[b, h // groups, t]))
                    for t in seen if pos[t] >= pos[j])  # fmt: skip
            p = min(p, NPOS - 1)
            low, high = int(np.floor(p)), int(np.ceil(p))
            s[j] += (q[b, h, i] @ e[low]) * (1 - (p - low)) + (q[b, h, i] @ e[high]) * (p - low)
        weights = np.exp(np.array([s[j] for j in seen]))
        out[b, h, i] = weights / weights.sum() @ v[b, h // groups, seen]
    return out


@pytest.mark.parametrize("case", ["in order", "shuffled", "packed", "grouped", "ties"])
def test_it_is_the_formula(case):
    q, k, v = vectors()
    pos, seg = np.arange(LENGTH), np.zeros(LENGTH, int)
    if case == "shuffled":
        pos = np.random.default_rng(0).permutation(40)[:LENGTH] - 20
    if case == "packed":
        packed = posenc.positions.packed([3, 5, 1])
        pos, seg = packed.pos, packed.seg
    if case == "grouped":
        k, v = k[:, :1], v[:, :1]
    if case == "ties":
        pos = np.array([3, 1, 1, 0, 2, 3, 3, 0, 4])
    where = {} if case == "in order" else {"tokens": posenc.Tokens(pos=pos, seg=seg)}
    found = posenc.attention(q, k, v, SCHEME, PARAMS, causal=True, **where)
    assert_near(found, by_loop(q, k, v, pos, seg), FLOAT64, case)


def test_gates_are_counted_in_the_order_of_places():
    at, vectors_ = np.random.default_rng(0).permutation(LENGTH), vectors()
    found, expected = (
        posenc.attention(*vectors_, SCHEME, PARAMS, tokens=tokens)
        for tokens in (posenc.Tokens(places=at), posenc.Tokens(pos=at))
    )
    assert_near(found, expected, FLOAT64)


def test_it_begins_as_nope():
    q, k, v = vectors()
    first = posenc.init_params(CoPE(DIM))
    assert first["e"].shape == (64, DIM)
    assert not np.any(first["e"])
    np.testing.assert_array_equal(
        posenc.attention(q, k, v, CoPE(DIM), first, causal=True),
        posenc.attention(q, k, v, posenc.NoPE(), causal=True),
    )


def test_memory_grows_with_the_scores_alone():
    """The sum over later keys is a cumulative sum, no array ``(Q, K, K)``."""

    def peak(length):
        q, k, v = vectors(length, heads=1)
        tracemalloc.start()
        posenc.attention(q, k, v, SCHEME, PARAMS, causal=True)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # A score is 2 sequences * 8 bytes; about a dozen arrays of that size live at once.
    assert peak(160) < 20 * 16 * 160**2


def test_positions_of_a_sum_come_from_rotated_scores():
    """Gates come from the scores as they are, and ``q . e`` from the query before its rotation."""
    q, k, v = vectors()
    rope = posenc.RoPE(DIM)
    params = {"1_e": PARAMS["e"]}
    found = posenc.attention(q, k, v, Sum(rope, SCHEME), params, causal=True)
    turned = [posenc.transform(rope, a, np.arange(LENGTH), role="key") for a in (q, k)]
    gates = [
        posenc.attention(*turned, v, posenc.NoPE(), causal=True),
        posenc.attention(q, k, v, SCHEME, PARAMS, causal=True),
    ]
    assert all(np.abs(found - other).max() > 0.01 for other in gates)


@pytest.mark.parametrize("route", [r for r in ROUTES if r.id in ("torch-sdpa", "jax-xla")])
def test_others_say_why_they_cannot(route):
    q, k, v = (a.astype(np.float32) for a in vectors())
    with pytest.raises(NotImplementedError, match="the position of a key counts gates of all"):
        route.attend(SCHEME, {"q": q, "k": k, "v": v}, {"e": PARAMS["e"].astype(np.float32)})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"npos": 1}, "npos"), ({"head_dim": 0}, "head_dim"), ({"init_std": -1.0}, "init_std")],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        CoPE(**{"head_dim": 4, **options})


def test_vectors_of_another_width():
    q, k, v = (a[..., :2] for a in vectors())
    with pytest.raises(ValueError, match="q has 2 channels, the scheme head_dim=4"):
        posenc.attention(q, k, v, SCHEME, PARAMS, causal=True)
