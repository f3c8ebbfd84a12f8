"""Slices of heads beside their law: numbers, keys that heads share, what is refused."""

import numpy as np
import pytest
from subjects import SUBJECTS

import posenc
from posenc.schemes import HeadSlice, Sink, Sum


def test_slopes_are_those_of_the_whole():
    part = HeadSlice(posenc.ALiBi(8), 4, 6)
    assert part.num_heads == 2
    found = posenc.bias(part, np.arange(3), np.arange(3))
    assert found.shape == (2, 3, 3)
    assert found[:, 2, 0].tolist() == [-2 * 2.0**-5, -2 * 2.0**-6]


def test_params_keep_the_names_of_a_model():
    part = HeadSlice(Sum(posenc.RoPE(8), posenc.T5Bias(4)), 1, 3)
    table = np.arange(4 * 32.0).reshape(4, 32)
    cut = part.slice_params({"0.1_table": table})
    np.testing.assert_array_equal(cut["0.1_table"], table[1:3])
    assert np.shares_memory(cut["0.1_table"], table)
    assert dict(HeadSlice(posenc.RoPE(8), 1, 3, 4).slice_params({})) == {}
    with pytest.raises(ValueError, match="Sum has no param 'tabel'"):
        part.slice_params({"tabel": table})
    with pytest.raises(ValueError, match=r"shape \(2, 32\), expected that of all heads, \(4, 32\)"):
        part.slice_params({"1_table": table[:2]})


def test_key_heads_of_a_slice():
    keys = lambda start, stop: HeadSlice(posenc.ALiBi(8), start, stop).key_heads(2)  # noqa: E731
    assert keys(0, 8) == slice(0, 2)
    assert keys(4, 8) == slice(1, 2)
    assert keys(5, 7) == slice(1, 2)
    assert HeadSlice(posenc.ALiBi(8), 2, 4).key_heads(8) == slice(2, 4)
    with pytest.raises(ValueError, match="num_kv_heads=3 does not divide 8 heads"):
        HeadSlice(posenc.ALiBi(8), 0, 4).key_heads(3)


def test_no_whole_groups():
    with pytest.raises(ValueError, match=r"heads 2 .. 5 are no whole groups of 4 that share keys"):
        HeadSlice(posenc.ALiBi(8), 2, 6).key_heads(2)


def test_arrays_of_keys_have_the_rows_of_key_heads():
    pope = posenc.make("pope", num_heads=2, head_dim=8)  # two heads of keys
    part = HeadSlice(pope, 4, 6, total=8)
    delta = np.arange(16.0).reshape(2, 8)
    np.testing.assert_array_equal(part.slice_params({"delta": delta})["delta"], delta[1:])
    assert part.param_specs()["delta"].shape == (1, 8)


REFUSED = {
    "dape": (SUBJECTS["dape"], 0, 1, None, "DAPE has no slices of heads: the score of a head"),
    "inside": (Sink(SUBJECTS["dape"]), 0, 1, None, "no slices of heads: the score of a head"),
    "summed": (
        Sum(posenc.RoPE(8), posenc.make("selective_rope", num_heads=4, head_dim=8)),
        0, 1, None, "Sum has no slices of heads: hidden states are cut into all heads",
    ),
    "empty": (posenc.ALiBi(8), 4, 4, None, "start=4, stop=4: a slice of 8 heads has 0 <= start"),
    "beyond": (posenc.ALiBi(8), 4, 9, None, "start=4, stop=9: a slice of 8 heads"),
    "negative": (posenc.ALiBi(8), -1, 4, None, "start"),
    "other": (posenc.ALiBi(8), 0, 4, 16, "total=16: the scheme has 8 heads"),
    "unknown": (posenc.RoPE(8), 0, 4, None, "total: RoPE has no number of heads"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "start", "stop", "total", "words"), REFUSED.values(), ids=REFUSED
)
def test_what_is_refused(scheme, start, stop, total, words):
    with pytest.raises(ValueError, match=words):
        HeadSlice(scheme, start, stop, total)
