"""xPos: scores of the formula, the centre, and what happens beyond the range of factors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.schemes import XPos
from posenc.testing.tolerances import rounding_bound

DIM = 8
ZETA = [(2 * k + 0.4 * DIM) / (1.4 * DIM) for k in range(DIM // 2)]
RANGE = 16_347  # 40 * 512 / ln(1 / zeta_0), rounded down


def pair_score(scheme, k, i, j, dtype="float64"):
    """The score of pair ``k`` alone, ones in both channels of query and key."""
    x = np.zeros((1, DIM), dtype)
    x[:, [k, k + DIM // 2] if scheme.layout == "half" else [2 * k, 2 * k + 1]] = 1
    q = posenc.transform(scheme, x, np.asarray([i]), role="query")
    key = posenc.transform(scheme, x, np.asarray([j]), role="key")
    return float(np.vdot(q, key))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("i", "j"), [(0, 0), (5, 2), (700, 100), (16_000, 15_990), (300, -4_000)])
def test_the_score_is_that_of_the_formula(i, j, layout):
    for k, zeta in enumerate(ZETA):
        found = pair_score(XPos(DIM, layout=layout), k, i, j)
        turn = 2 * math.cos((i - j) * 10_000 ** (-2 * k / DIM))
        # The angle is rounded where it is as large as i - j.
        size = 2 * zeta ** ((i - j) / 512)
        assert abs(found - turn * zeta ** ((i - j) / 512)) < size * (1e-12 + 2e-16 * abs(i - j))


def test_the_first_decays():
    assert [round(zeta, 4) for zeta in ZETA] == [0.2857, 0.4643, 0.6429, 0.8214]
    assert pair_score(XPos(DIM), 0, 512, 512) == pytest.approx(2)
    decay = pair_score(XPos(DIM, base=1e300), 1, 512, 0) / 2  # pair 1 hardly turns
    assert decay == pytest.approx(0.46428571)


def test_the_centre_shows_in_vectors_and_cancels_in_scores():
    x, at = normal((3, DIM), 0), np.asarray([10, 11, 300])
    one, other = XPos(DIM), XPos(DIM, center=100)
    q, k = (posenc.transform(one, x, at, role=role) for role in ("query", "key"))
    q_too, k_too = (posenc.transform(other, x, at, role=role) for role in ("query", "key"))
    assert np.abs(q - q_too).max() > 0.01
    np.testing.assert_allclose(q_too @ k_too.T, q @ k.T, rtol=1e-12, atol=1e-13)
    at_centre = posenc.transform(other, x[:1], np.asarray([100]), role="key")
    plain = posenc.transform(posenc.RoPE(DIM), x[:1], np.asarray([100]), role="key")
    np.testing.assert_allclose(at_centre, plain, rtol=1e-15)


def test_factors_in_float32_are_within_sixteen_roundings():
    at = np.asarray([1, 4_567, 9_999, RANGE, 60_000, 500_000])
    x = np.ones((len(at), DIM))
    for role in ("query", "key"):
        narrow, wide = (
            np.linalg.norm(posenc.transform(XPos(DIM), x.astype(t), at, role=role), axis=-1)
            for t in ("float32", "float64")
        )
        np.testing.assert_allclose(narrow, wide, rtol=rounding_bound(16))


def test_a_factor_stops_at_the_end_of_its_range():
    ends = [pair_score(XPos(DIM), 0, i, i) for i in (RANGE, RANGE + 1, 2**29)]
    assert ends == pytest.approx([2, 2, 2])

    def decay(i, j):  # without rotation
        return pair_score(XPos(DIM, base=1e300), 1, i, j) / 2

    last = int(40 * 512 / -math.log(ZETA[1]))
    assert decay(last, last - 512) == pytest.approx(ZETA[1])
    assert decay(last + 600, last + 88) == pytest.approx(1)  # both beyond: no decay left
    scores = [pair_score(XPos(DIM), 0, *at, "float32") for at in ((2**29, -(2**29)), (0, 2**29))]
    assert np.all(np.isfinite(scores))


FAR = 2**20 - 30  # 64 times the range of factors


def by_formula(q, k, v, pos, layout):
    """Causal attention from every pair's angle and decay, in float64."""
    first, second = (
        (slice(None, DIM // 2), slice(DIM // 2, None))
        if layout == "half"
        else (slice(0, None, 2), slice(1, None, 2))
    )
    (a, b), (c, d) = ((x[..., first], x[..., second]) for x in (q, k))
    ahead = (pos[:, None] - pos[None, :]).astype(np.float64)
    scores = 0
    for n, zeta in enumerate(ZETA):
        turn = ahead * 10_000.0 ** (-2 * n / DIM)
        one, other = (x[..., n][:, :, :, None] for x in (a, b))
        with_c, with_d = (x[..., n][:, :, None, :] for x in (c, d))
        same, across = one * with_c + other * with_d, one * with_d - other * with_c
        decay = zeta ** (np.maximum(ahead, 0) / 512)
        scores = scores + (same * np.cos(turn) + across * np.sin(turn)) * decay
    scores = np.where(ahead >= 0, scores / math.sqrt(DIM), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_without_a_centre_it_is_the_formula_far_away(layout):
    q, k, v = (3 * normal((1, 2, 30, DIM), seed) for seed in range(3))
    pos = np.concatenate([FAR + np.arange(20), np.arange(5), 3_000 * np.arange(5)])
    expected = by_formula(q, k, v, pos, layout)
    call = {"causal": True, "tokens": posenc.Tokens(pos=pos)}
    found = posenc.attention(q, k, v, XPos(DIM, layout=layout, center=None), **call)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)  # angles of 1e6 in float64
    narrow = (x.astype("float32") for x in (q, k, v))
    found = posenc.attention(*narrow, XPos(DIM, layout=layout, center=None), **call)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    clamped = posenc.attention(q, k, v, XPos(DIM, layout=layout), **call)
    assert np.abs(clamped - expected).max() > 0.1


def test_without_a_centre_it_is_the_scheme_near():
    q, k, v = (normal((1, 2, 30, DIM), seed) for seed in range(3))
    found, expected = (
        posenc.attention(q, k, v, XPos(DIM, center=center), causal=True) for center in (None, 0)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
    assert XPos(DIM).hooks() == {"transform", "rotary"}


def test_errors():
    with pytest.raises(ValueError, match="scale_base must be finite and greater than 0, got 0"):
        XPos(DIM, scale_base=0.0)
    with pytest.raises(ValueError, match="center must be a position below"):
        XPos(DIM, center=2**30)
    with pytest.raises(ValueError, match="head_dim must be even, got 7"):
        XPos(7)
