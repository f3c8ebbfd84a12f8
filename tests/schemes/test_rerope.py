"""ReRoPE and leaky ReRoPE: equal to attention by distance, at any window, leak and length."""

from __future__ import annotations

import math

import numpy as np
import pytest
from by_distance import attention_by_distance, mirrored
from hypothesis import given
from hypothesis import strategies as st
from subjects import normal

import posenc
from posenc.attn.prepare import prepare
from posenc.schemes import ReRoPE
from posenc.testing.tolerances import ATTENTION_TOL

DIM = 8
FLOAT64 = 2 * ATTENTION_TOL["float64"]  # either is rounded


def tokens(length, queries=None, seed=0):
    shapes = [(1, 2, n, DIM) for n in (queries or length, length, length)]
    return [normal(shape, seed + n) for n, shape in enumerate(shapes)]


def distance_of(window, leak):
    def distance(i, j):
        n = i - j
        return np.where(n < window, n, window + (0 if leak is None else (n - window) / leak))

    return mirrored(distance)


@given(
    st.integers(1, 30), st.integers(1, 12), st.sampled_from([None, 0.5, 1.3, 16.0]),
    st.booleans(), st.sampled_from(["half", "interleaved"]), st.integers(-1000, 1000),
)  # fmt: skip
def test_it_is_attention_by_distance(length, window, leak, causal, layout, start):
    q, k, v = tokens(length)
    pos = start + np.arange(length)
    scheme = ReRoPE(DIM, window, leak, base=100.0, layout=layout)
    found = posenc.attention(q, k, v, scheme, causal=causal, tokens=posenc.Tokens(pos=pos))
    i, j = pos[:, None], pos[None, :]
    seen = j <= i if causal else None
    want = attention_by_distance(
        q, k, v, distance_of(window, leak)(i, j), base=100.0, layout=layout, seen=seen
    )
    # Angles of the formula are rounded where they are as large as positions.
    np.testing.assert_allclose(found, want, rtol=0, atol=FLOAT64)


def test_a_score_by_hand():
    """One pair of channels: query 9 at key 2 is ``cos`` of the distance, 4, or 4 + 3/2."""
    q = np.reshape([1.0, 0.0], (1, 1, 1, 2))
    for leak, distance in ((None, 4), (2.0, 5.5), (1.0, 7)):
        _, lse = posenc.attention(
            q, q, q, ReRoPE(2, 4, leak), return_lse=True,
            tokens=posenc.Tokens(pos=np.asarray([2])), queries=posenc.Tokens(pos=np.asarray([9])),
        )  # fmt: skip
        assert lse.item() == pytest.approx(math.cos(distance) / math.sqrt(2), abs=1e-15)


def test_queries_grow_with_the_logarithm_of_their_position():
    q, k, v = tokens(24)
    found = posenc.attention(q, k, v, ReRoPE(DIM, 3, 2.0, train_len=8), causal=True)
    at = np.arange(24)
    i, j = at[:, None], at[None, :]
    factor = np.maximum(1, np.log(i + 1) / math.log(8))
    want = attention_by_distance(q, k, v, distance_of(3, 2.0)(i, j), factor=factor, seen=j <= i)
    np.testing.assert_allclose(found, want, rtol=0, atol=FLOAT64)


def test_angles_are_exact_far_away():
    """``n / leak`` is no float32 number; only integers of positions and fixed turns are used."""
    q, k, v = (a.astype("float32") for a in tokens(6))
    pos = 2**24 + np.asarray([0, 1, 2, 3, 1000, 1001])
    out = posenc.attention(q, k, v, ReRoPE(DIM, 3, 3.7), causal=True, tokens=posenc.Tokens(pos=pos))
    i, j = pos[:, None], pos[None, :]
    wide = (a.astype("float64") for a in (q, k, v))
    want = attention_by_distance(*wide, distance_of(3, 3.7)(i, j), seen=j <= i)
    np.testing.assert_allclose(out, want, rtol=0, atol=ATTENTION_TOL["float32"])


def test_a_causal_call_has_no_region_of_later_keys():
    q, k, v = tokens(12)
    assert len(ReRoPE(DIM, 4).regions()) == len(prepare(q, k, v, ReRoPE(DIM, 4)).regions) == 3
    assert len(prepare(q, k, v, ReRoPE(DIM, 4), causal=True).regions) == 2


def test_the_window_follows_from_the_length_of_training():
    scheme = posenc.make("rerope", head_dim=DIM, train_len=4096)
    assert scheme == ReRoPE(DIM, 1024, train_len=4096)
    assert posenc.make("rerope", head_dim=DIM, train_len=4096, window=512).window == 512
    with pytest.raises(TypeError, match="ReRoPE needs window"):
        posenc.make("rerope", head_dim=DIM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be"),
        ({"window": 2**31}, r"window must be at most 2\*\*30"),
        ({"leak": 0.0}, "leak must be"),
        ({"train_len": 1}, "train_len must be"),
        ({"layout": "pairs"}, "unknown layout"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        ReRoPE(DIM, **{"window": 4, **options})
