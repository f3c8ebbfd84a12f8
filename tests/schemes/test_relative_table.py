"""The clipped table: each distance reads its own number, by hand."""

from __future__ import annotations

import numpy as np
import pytest

import posenc
from posenc import SchemeWarning
from posenc.schemes import RelativeTable

TABLE = np.stack([np.arange(7), 10 * np.arange(7)]).astype(np.float32)


def test_both_directions():
    found = posenc.bias(
        RelativeTable(2, max_distance=3), np.asarray([5]), np.arange(11), {"table": TABLE}
    )
    own = [0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 6]  # clip(j - i, -3, 3) + 3
    np.testing.assert_array_equal(found[:, 0], [own, np.multiply(10, own)])


def test_one_direction():
    scheme = RelativeTable(2, max_distance=6, bidirectional=False)
    found = posenc.bias(scheme, np.asarray([8]), np.arange(11), {"table": TABLE})
    own = [6, 6, 6, 5, 4, 3, 2, 1, 0, 0, 0]  # clip(i - j, 0, 6)
    np.testing.assert_array_equal(found[:, 0], [own, np.multiply(10, own)])


def test_sizes_and_first_values():
    assert posenc.init_params(RelativeTable(2))["table"].shape == (2, 257)
    assert posenc.init_params(RelativeTable(2, bidirectional=False))["table"].shape == (2, 129)
    table = posenc.init_params(RelativeTable(40, max_distance=50))["table"]
    # 4040 numbers: the standard deviation of theirs is 1.1 % of it.
    assert abs(np.std(table) / 0.02 - 1) < 5 * 0.011


def test_a_decoder_trained_at_a_length_sees_every_number():
    made = posenc.make("relative_table", num_heads=2, train_len=16)
    assert made == RelativeTable(2, max_distance=15, bidirectional=False)
    made = posenc.make("relative_table", num_heads=2, train_len=4096)
    assert made == RelativeTable(2, max_distance=128, bidirectional=False)
    assert posenc.make("relative_table", num_heads=2) == RelativeTable(2)


def test_half_a_table_is_probably_a_mistake():
    x = np.zeros((3, 1, 2, 4, 8), np.float32)
    scheme = RelativeTable(2, max_distance=3)
    with pytest.warns(SchemeWarning, match="half of its table is never read"):
        posenc.attention(*x, scheme, {"table": TABLE}, causal=True)


def test_wrong_options():
    with pytest.raises(ValueError, match="max_distance must be at least 1, got 0"):
        RelativeTable(2, max_distance=0)
    with pytest.raises(TypeError, match="bidirectional must be True or False, got 'no'"):
        RelativeTable(2, bidirectional="no")
