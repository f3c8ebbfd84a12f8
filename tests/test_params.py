"""First values: declared shapes, the same for the same seed."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np
import pytest
from subjects import SUBJECTS, Forgetting

import posenc
from posenc.params import HeadTable


@pytest.mark.parametrize("subject", SUBJECTS)
def test_first_values_are_what_is_declared(subject):
    scheme = SUBJECTS[subject]
    found, again = posenc.init_params(scheme, 3), posenc.init_params(scheme, 3)
    assert found.keys() == scheme.param_specs().keys()
    for name, spec in scheme.param_specs().items():
        assert type(found[name]) is np.ndarray
        assert found[name].shape == tuple(spec.shape)
        assert found[name].dtype == np.float32
        assert np.all(np.isfinite(found[name]))
        np.testing.assert_array_equal(found[name], again[name])
        found[name][...] = 0  # the caller's own
        np.testing.assert_array_equal(posenc.init_params(scheme, 3)[name], again[name])


@pytest.mark.parametrize("seed", [0, 2**62, [1, 2, 3]])
def test_seeds_decide(seed):
    table = posenc.init_params(posenc.T5Bias(4), seed)["table"]
    np.testing.assert_array_equal(table, posenc.init_params(posenc.T5Bias(4), seed)["table"])
    assert not np.array_equal(table, posenc.init_params(posenc.T5Bias(4), 1)["table"])


def test_the_default_draw_is_normal_and_small():
    table = posenc.init_params(posenc.Learned(max_len=1000, dim=64))["table"]
    assert abs(table.std() / 0.02 - 1) < 0.02  # six standard errors of 64,000 draws
    assert abs(table.mean()) < 6 * 0.02 / 64_000**0.5
    assert posenc.init_params(posenc.NoPE()) == {}


def test_a_head_table_answers_for_every_head():
    array = np.arange(24.0).reshape(2, 3, 4)
    table = HeadTable(array, xp)
    i, j = np.asarray([[0], [2]])[None], np.asarray([[3, 1]])[None]
    np.testing.assert_array_equal(table[i, j], array[:, i[0], j[0]])
    np.testing.assert_array_equal(table[1, j], array[:, 1, j[0]])
    np.testing.assert_array_equal(table[1, 2], array[:, 1, 2][:, None, None])
    with pytest.raises(IndexError, match="2 indices"):
        table[i]


X = np.ones((1, 5, 6), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at_pos": np.arange(5)}, "without pos"),
        ({"pos": np.arange(5), "at_seg": np.arange(5)}, "without seg"),
        ({"pos": np.arange(4)}, "pos .* does not fit x"),
        ({"pos": np.zeros((3, 5), int)}, "pos .* does not fit x"),
        ({"seg": np.zeros((3, 5), int)}, "seg .* does not fit x"),
        ({"carry": np.zeros((3, 2), np.float32)}, "carry must be"),
    ],
)
def test_coordinates_of_what_does_not_fit(changes, message):
    scheme = Forgetting(num_heads=2)
    with pytest.raises(ValueError, match=message):
        posenc.coordinates(scheme, X, posenc.init_params(scheme), **changes)
