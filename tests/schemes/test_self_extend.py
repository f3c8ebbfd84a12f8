"""Self-Extend: equal to attention by distances of groups, at any group, window and length."""

from __future__ import annotations

import numpy as np
import pytest
from by_distance import attention_by_distance, mirrored
from hypothesis import given
from hypothesis import strategies as st
from subjects import normal

import posenc
from posenc.schemes import RoPE, SelfExtend
from posenc.testing.tolerances import ATTENTION_TOL

DIM = 8
FLOAT64 = 2 * ATTENTION_TOL["float64"]  # either is rounded


def tokens(length):
    return [normal((1, 2, length, DIM), n) for n in range(3)]


def distance_of(group, window):
    def distance(i, j):
        far = i // group + window - window // group - j // group
        return np.where(i - j < window, i - j, far)

    return mirrored(distance)


@given(
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(1, 12),
    st.booleans(),
    st.integers(-1000, 1000),
)
def test_it_is_attention_by_distance(length, group, window, causal, start):
    q, k, v = tokens(length)
    pos = start + np.arange(length)
    scheme = SelfExtend(DIM, group, window, base=100.0, layout="interleaved")
    found = posenc.attention(q, k, v, scheme, causal=causal, tokens=posenc.Tokens(pos=pos))
    i, j = pos[:, None], pos[None, :]
    want = attention_by_distance(
        q, k, v, distance_of(group, window)(i, j), base=100.0, layout="interleaved",
        seen=j <= i if causal else None,
    )  # fmt: skip
    np.testing.assert_allclose(found, want, rtol=0, atol=FLOAT64)


def test_distances_by_hand():
    """Groups of 2, a window of 4, the last query of 10: ``9 // 2 + 4 - 2 - j // 2`` for j < 6."""
    found = distance_of(2, 4)(9, np.arange(10))
    np.testing.assert_array_equal(found, [6, 6, 5, 5, 4, 4, 3, 2, 1, 0])


def test_groups_of_one_are_rope():
    q, k, v = tokens(12)
    for causal in (True, False):
        found = posenc.attention(q, k, v, SelfExtend(DIM, group=1, window=4), causal=causal)
        want = posenc.attention(q, k, v, RoPE(DIM), causal=causal)
        np.testing.assert_allclose(found, want, rtol=0, atol=FLOAT64)


def test_the_window_follows_from_the_length_of_training():
    assert posenc.make("self_extend", head_dim=DIM, train_len=4096) == SelfExtend(DIM)
    assert posenc.make("self_extend", head_dim=DIM) == SelfExtend(DIM, 8, 1024)


@pytest.mark.parametrize("value", [0, 2**31])
@pytest.mark.parametrize("name", ["group", "window"])
def test_wrong_options(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        SelfExtend(DIM, **{name: value})
