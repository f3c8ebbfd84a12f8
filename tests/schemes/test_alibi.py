"""ALiBi's forms without a causal mask, other slopes, and slopes at another length, by hand."""

from __future__ import annotations

import numpy as np
import pytest

import posenc
from posenc import ALiBi, SchemeWarning
from posenc.contract.protocol import Hook

INF = np.inf
Q, K = np.asarray([2]), np.arange(5)  # distances 2, 1, 0, and 1, 2 to later keys


def row(scheme, params=None):
    return posenc.bias(scheme, Q, K, params)[:, 0]


def test_asymmetric_heads_see_one_side_each():
    # Two heads a side, each with the slopes of two heads: 2**-4 and 2**-8.
    steps = np.asarray([2, 1, 0, 1, 2])
    before, after = (np.where(seen, steps, INF) for seen in ([1, 1, 1, 0, 0], [0, 0, 1, 1, 1]))
    found = row(ALiBi(4, noncausal="asymmetric"))
    np.testing.assert_array_equal(found, [-before / 16, -before / 256, -after / 16, -after / 256])


def test_asymmetric_slopes_may_be_given():
    found = row(ALiBi(2, slopes=[1.0, 3.0], noncausal="asymmetric"))
    np.testing.assert_array_equal(found, [[-2, -1, 0, -INF, -INF], [-INF, -INF, 0, -3, -6]])


def test_asymmetric_is_causal_attention_and_its_mirror():
    x = np.random.default_rng(0).standard_normal((3, 1, 2, 9, 8))
    both = posenc.attention(*x, ALiBi(2, slopes=[0.5, 0.25], noncausal="asymmetric"))
    past = posenc.attention(*x[:, :, :1], ALiBi(1, slopes=[0.5]), causal=True)
    mirrored = x[:, :, 1:, ::-1]
    future = posenc.attention(*mirrored, ALiBi(1, slopes=[0.25]), causal=True)[:, :, ::-1]
    np.testing.assert_allclose(both, np.concatenate([past, future], 1), rtol=0, atol=1e-14)


def test_offset():
    found = row(ALiBi(1, slopes=[2.0], noncausal="offset"))
    np.testing.assert_array_equal(found, [[-4, -2, 0, -1, -3]])


def test_two_sided_with_given_slopes():
    scheme = ALiBi(2, slopes=[1.0, 2.0], noncausal="two_sided", later_slopes=np.asarray([3.0, 0.5]))
    np.testing.assert_array_equal(row(scheme), [[-2, -1, 0, -3, -6], [-4, -2, 0, -0.5, -1]])
    assert not scheme.param_specs()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["later_slopes"]),
        ({"learned": True}, ["slopes", "later_slopes"]),
        ({"learned": True, "later_slopes": [2.0, 4.0]}, ["slopes", "later_slopes"]),
    ],
)
def test_two_sided_with_learned_slopes(options, names):
    scheme = ALiBi(2, slopes=[1.0, 2.0], noncausal="two_sided", **options)
    first = posenc.init_params(scheme)
    assert list(first) == names
    np.testing.assert_array_equal(first["later_slopes"], options.get("later_slopes", [1, 2]))
    given = {name: np.asarray([8.0, 9.0], np.float32) for name in names}
    before = [8, 9] if "slopes" in names else [1, 2]
    found = row(scheme, given)
    np.testing.assert_array_equal(found[:, [0, 3]], [[-2 * before[0], -8], [-2 * before[1], -9]])


def test_max_bias_is_the_last_exponent():
    found = row(ALiBi(4, max_bias=4))
    np.testing.assert_array_equal(found[:, 1], [-0.5, -0.25, -0.125, -0.0625])
    uneven = row(ALiBi(3, max_bias=16))  # 2**-8, 2**-16, then the first of four: 2**-4
    np.testing.assert_array_equal(uneven[:, 1], [-(2.0**-8), -(2.0**-16), -(2.0**-4)])
    geometric = row(ALiBi(3, slopes="geometric", max_bias=3))
    np.testing.assert_array_equal(geometric[:, 1], [-0.5, -0.25, -0.125])


@pytest.mark.parametrize("learned", [False, True])
def test_slopes_at_another_length(learned):
    options = {"slopes": [1.0, 2.0], "noncausal": "two_sided", "later_slopes": [4.0, 8.0]}
    scheme = ALiBi(2, interpolate_from=100, learned=learned, **options)
    params = posenc.init_params(scheme)
    usual = row(scheme, params)
    np.testing.assert_array_equal(usual[:, [0, 3]], [[-2, -4], [-4, -8]])
    for length, factor in ((50, 1), (100, 1), (200, 0.5), (400, 0.25)):
        np.testing.assert_array_equal(row(scheme.at_length(length), params), factor * usual)
    again = scheme.at_length(400).at_length(100)
    np.testing.assert_array_equal(row(again, params), usual)
    fixed = ALiBi(2, **options)
    assert fixed.at_length(400) is fixed


def test_what_each_form_claims():
    hooks = {form: ALiBi(2, noncausal=form).hooks() for form in ("symmetric", "asymmetric")}
    assert hooks["symmetric"] - hooks["asymmetric"] == {"key_bias"}
    assert Hook.AT_LENGTH not in hooks["symmetric"]
    assert "at_length" in ALiBi(2, interpolate_from=9).hooks()


@pytest.mark.parametrize(
    ("form", "warning"),
    [("asymmetric", "half of the heads see only"), ("two_sided", "later_slopes are never read")],
)
def test_a_form_for_both_sides_is_probably_a_mistake_in_a_decoder(form, warning):
    x = np.zeros((3, 1, 2, 4, 8), np.float32)
    scheme = ALiBi(2, noncausal=form)
    with pytest.warns(SchemeWarning, match=warning):
        posenc.attention(*x, scheme, posenc.init_params(scheme), causal=True)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"noncausal": "both"}, "unknown noncausal 'both'; accepted: symmetric, asymmetric, two_"),
        ({"num_heads": 3, "noncausal": "asymmetric"}, "needs an even num_heads, got 3"),
        ({"later_slopes": [1.0, 2.0]}, "later_slopes needs noncausal='two_sided', got 'symmetric'"),
        ({"noncausal": "two_sided", "later_slopes": [1.0]}, "later_slopes has 1 values for num_"),
        ({"slopes": [1.0, 2.0], "max_bias": 4}, "max_bias=4 needs a rule for slopes"),
        ({"max_bias": 0}, "max_bias must be finite and greater than 0, got 0"),
        ({"interpolate_from": 0}, "interpolate_from must be at least 1, got 0"),
        ({"length": 64}, "length=64 needs interpolate_from"),
    ],
)
def test_wrong_options(options, error):
    with pytest.raises(ValueError, match=error):
        ALiBi(**{"num_heads": 2, **options})
