"""Chunks of positions: by hand, and equal to segments."""

from __future__ import annotations

import numpy as np
import pytest

import posenc
from posenc.schemes import Chunk, Sum

INF = float("inf")


def test_the_bias_by_hand():
    positions = np.arange(-1, 4)  # chunks -1, 0, 0, 0, 1
    expected = np.full((5, 5), -INF)
    expected[0, 0] = expected[4, 4] = 0
    expected[1:4, 1:4] = 0
    bias = posenc.bias(Chunk(3), positions, positions)
    np.testing.assert_array_equal(bias.reshape(5, 5), expected)


def test_chunks_are_segments_and_no_window():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 10, 4))
    chunks = np.arange(10) // 4
    by_scheme = posenc.attention(q, k, v, Sum(posenc.RoPE(4), Chunk(4)), causal=True)
    by_segments = posenc.attention(
        q, k, v, posenc.RoPE(4), causal=True, tokens=posenc.Tokens(seg=chunks)
    )
    np.testing.assert_array_equal(by_scheme, by_segments)
    np.testing.assert_array_equal(by_scheme[:, :, ::4], v[:, :, ::4])  # the first of a chunk


def test_chunks_around_the_own_one():
    at = np.arange(6)
    back = at[:, None] // 2 - at // 2
    for window, seen in (
        ((1, 0), (back <= 1) & (back >= 0)), ((None, -2), back >= 2), ((-1, None), back <= -1),
        ((None, None), back == back),
    ):  # fmt: skip
        np.testing.assert_array_equal(
            posenc.bias(Chunk(2, window), at, at)[0], np.where(seen, 0, -INF)
        )
    with pytest.raises(ValueError, match=r"window must be .* -left <= right, got"):
        Chunk(2, (-2, 1))
    with pytest.raises(ValueError, match=r"window must be at most 2\*\*30 chunks or None, got"):
        Chunk(1, (2**31, 0))


def test_its_size_is_checked():
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        Chunk(0)
    with pytest.raises(ValueError, match=r"size must be at most 2\*\*30"):
        Chunk(2**31)
