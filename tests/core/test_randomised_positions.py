"""Positions for training: increasing samples without replacement, all equally probable."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from posenc.positions import randomised


def test_every_set_of_positions_is_equally_probable():
    draws = randomised(np.random.default_rng(0), 2, 5, batch=4000)
    counts = Counter(map(tuple, draws.tolist()))
    assert set(counts) == set(combinations(range(5), 2))  # in order, none twice
    # A count is binomial, 4000 draws of probability 1/10: five standard deviations are 95.
    assert max(abs(count - 400) for count in counts.values()) < 95


def test_shapes_and_the_generator():
    alone = randomised(np.random.default_rng(1), 7, 2**30)
    rows = randomised(np.random.default_rng(1), 7, 2**30, batch=3)
    assert alone.shape == (7,)
    assert rows.shape == (3, 7)
    assert alone.dtype == rows.dtype == np.int64
    np.testing.assert_array_equal(rows[0], alone)
    assert (np.diff(rows) > 0).all()
    assert len(np.unique(rows)) == 21
    np.testing.assert_array_equal(randomised(np.random.default_rng(2), 5, 5), range(5))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4, 9), TypeError, r"rng must be a numpy.random.Generator, got 0"),
        ((np.random.default_rng(0), 0, 9), ValueError, "length must be at least 1, got 0"),
        ((np.random.default_rng(0), 4, 3), ValueError, r"max_len must be length=4 .. 2\*\*30"),
        ((np.random.default_rng(0), 4, 2**30 + 1), ValueError, "got 1073741825"),
        ((np.random.default_rng(0), 4, 9, 0), ValueError, "batch must be at least 1, got 0"),
        ((np.random.default_rng(0), 4.0, 9), TypeError, "length must be an integer, got 4.0"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        randomised(*arguments)
