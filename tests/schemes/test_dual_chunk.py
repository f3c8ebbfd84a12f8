"""Dual chunk attention: equal to attention by distances of chunks, at any sizes and length."""

from __future__ import annotations

import numpy as np
import pytest
from by_distance import attention_by_distance, mirrored
from hypothesis import given
from hypothesis import strategies as st
from subjects import normal

import posenc
from posenc.attn.prepare import prepare
from posenc.schemes import DualChunk
from posenc.testing.tolerances import ATTENTION_TOL

DIM = 8
FLOAT64 = 2 * ATTENTION_TOL["float64"]  # either is rounded


def tokens(length):
    return [normal((1, 2, length, DIM), n) for n in range(3)]


def distance_of(chunk, local):
    s = chunk - local

    def distance(i, j):
        back = i // s - j // s
        ahead = np.where(back == 0, i % s, np.where(back == 1, i % s + s, 2 * s - 1))
        return np.where(back == 0, ahead, np.minimum(ahead, chunk)) - j % s

    return mirrored(distance)


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 8),
    st.booleans(),
    st.integers(-1000, 1000),
)
def test_it_is_attention_by_distance(length, s, local, causal, start):
    q, k, v = tokens(length)
    pos = start + np.arange(length)
    scheme = DualChunk(DIM, 64, s + local, local, base=100.0, layout="interleaved")
    found = posenc.attention(q, k, v, scheme, causal=causal, tokens=posenc.Tokens(pos=pos))
    i, j = pos[:, None], pos[None, :]
    want = attention_by_distance(
        q, k, v, distance_of(s + local, local)(i, j), base=100.0, layout="interleaved",
        seen=j <= i if causal else None,
    )  # fmt: skip
    np.testing.assert_allclose(found, want, rtol=0, atol=FLOAT64)


def test_distances_by_hand():
    """Chunks of 4 of which 1 is local: the query at 7 is at 1 in its own, then at 4 and at 4."""
    assert DualChunk(DIM, 64, 4, 1).regions()[0][1] == (2, 2)
    np.testing.assert_array_equal(distance_of(4, 1)(7, np.arange(8)), [4, 3, 2, 4, 3, 2, 1, 0])
    np.testing.assert_array_equal(distance_of(4, 1)(6, np.arange(7)), [4, 3, 2, 3, 2, 1, 0])


def test_near_keys_have_their_own_distance_and_none_is_far():
    at = np.arange(200)
    i, j = at[:, None], at[None, :]
    found, n = distance_of(24, 6)(i, j), i - j
    near = np.abs(n) <= 6
    np.testing.assert_array_equal(found[near], n[near])
    assert np.abs(found).max() == 24


def test_sizes_follow_from_the_length_of_training():
    q, k, v = tokens(12)
    assert posenc.make("dual_chunk", head_dim=DIM, train_len=32) == DualChunk(DIM, 32)
    found, given = (
        posenc.attention(q, k, v, scheme, causal=True)
        for scheme in (DualChunk(DIM, 8), DualChunk(DIM, 99, 6, 1))
    )
    np.testing.assert_array_equal(found, given)


def test_a_causal_call_has_no_region_of_later_keys():
    q, k, v = tokens(12)
    assert len(prepare(q, k, v, DualChunk(DIM, 8)).regions) == 5
    assert len(prepare(q, k, v, DualChunk(DIM, 8), causal=True).regions) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_len": 0}, "train_len must be"),
        ({"train_len": 2**33}, "train_len must be at most"),
        ({"chunk_size": 2**33}, "chunk_size must be at most"),
        ({"chunk_size": 0}, "chunk_size must be"),
        ({"local_size": -1}, "local_size must be at least 0"),
        ({"local_size": 6}, "local_size must be below chunk_size=6, got 6"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        DualChunk(DIM, **{"train_len": 8, **options})
