"""Shaw's vectors per distance: scores by hand, sizes, first values and errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

import posenc
from posenc.schemes import Shaw
from posenc.testing import assert_near
from posenc.testing.tolerances import rounding_bound

TABLE = np.asarray([[-1.0, 0.0], [3.0, 5.0], [0.5, -2.0], [0.0, 7.0], [4.0, 1.0]])  # K = 2
Q = np.asarray([[1.0, 2.0], [-3.0, 0.5], [0.25, 1.0]])


def test_the_score_is_that_of_the_formula():
    """Keys of zeros leave ``q_i . a_n / sqrt(2)``; values that are unit vectors show weights."""
    scheme, q = Shaw(2, max_distance=2), np.stack([Q, 2 * Q])[None]
    k, v, at = np.zeros((1, 2, 8, 2)), np.broadcast_to(np.eye(8), (1, 2, 8, 8)), [4, 5, 9]
    weights = posenc.attention(
        q, k, v, scheme, {"table": TABLE},
        tokens=posenc.Tokens(pos=np.arange(1, 9)), queries=posenc.Tokens(pos=np.asarray(at)),
    )  # fmt: skip
    rows = [  # clip(j - i, -2, 2) + 2, for keys 1 .. 8
        [0, 0, 1, 2, 3, 4, 4, 4],
        [0, 0, 0, 1, 2, 3, 4, 4],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
    scores = [TABLE[row] @ query / math.sqrt(2) for row, query in zip(rows, Q, strict=True)]
    for head in (0, 1):
        want = [np.exp((head + 1) * row) for row in scores]
        want = [row / np.sum(row) for row in want]
        # Scores below 32 of four roundings, and sums of 8 terms.
        assert_near(weights[0, head], want, rounding_bound(16, 32, "float64"))


def test_the_features_of_a_query_are_one_number_per_distance():
    scheme = Shaw(2, max_distance=2)
    query, key = posenc.features(scheme, {"table": TABLE}, q=Q[None, None], scale=3.0)
    assert key.features == {}
    assert_near(query.features["r"][0, 0], 3 * Q @ TABLE.T, rounding_bound(4, 64, "float64"))


def test_sizes_and_first_values():
    assert posenc.init_params(Shaw(8))["table"].shape == (33, 8)
    assert posenc.make("shaw", num_heads=3, head_dim=8) == Shaw(8, max_distance=16)
    table = posenc.init_params(Shaw(64, max_distance=50))["table"]
    most = math.sqrt(6 / (101 + 64))
    assert 0.99 * most < np.max(np.abs(table)) <= np.float32(most)


def test_wrong_options():
    with pytest.raises(ValueError, match="max_distance must be at least 1, got 0"):
        Shaw(8, max_distance=0)
    q = np.zeros((1, 1, 3, 4))
    with pytest.raises(ValueError, match="q has 4 channels, the scheme head_dim=2"):
        posenc.attention(q, q, q, Shaw(2, max_distance=2), {"table": TABLE})
