"""KERPLE: numbers by hand from ``-p ln(1 + a n)`` and ``-a n**p``."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import HAS

import posenc
from posenc.schemes import Kerple

ULP = 2.0**-52  # of float64; a logarithm or power, a product and a sum are rounded
PARAMS = {"p": np.asarray([2.0, 0.5]), "a": np.asarray([1.0, 3.0])}


def at(scheme, distances, params=PARAMS):
    """The bias ``(H, n)`` of keys so far before a query."""
    return posenc.bias(scheme, np.asarray([0]), -np.asarray(distances), params)[:, 0]


def test_the_logarithmic_form():
    found = at(Kerple(2), [0, 1, 7, -7])
    expected = [
        [0, -2 * math.log(2), -2 * math.log(8), -2 * math.log(8)],
        [0, -0.5 * math.log(4), -0.5 * math.log(22), -0.5 * math.log(22)],
    ]
    np.testing.assert_allclose(found, expected, rtol=4 * ULP)


def test_the_power_form():
    found = at(Kerple(2, kind="power"), [0, 1, 4, -9])
    np.testing.assert_allclose(found, [[0, -1, -16, -81], [0, -3, -6, -9]], rtol=4 * ULP)


def test_the_power_1_is_alibi():
    slopes = 2.0 ** -np.arange(1, 9)
    params = {"p": np.ones(8), "a": np.maximum(slopes, 0.01)}
    alibi = posenc.ALiBi(8, slopes=np.maximum(slopes, 0.01))
    q, k = np.arange(40), np.arange(-3, 50)
    found = posenc.bias(Kerple(8, kind="power"), q, k, params)
    np.testing.assert_array_equal(found, posenc.bias(alibi, q, k, dtype=np.float64))


@pytest.mark.parametrize(
    ("kind", "name", "wrong", "counts_as"),
    [
        ("log", "p", -1.0, 0.01),
        ("log", "a", 0.0, 0.01),
        ("power", "p", 2.5, 2.0),
        ("power", "p", 0.001, 0.01),
        ("power", "a", -3.0, 0.01),
    ],
)
def test_numbers_are_limited_as_the_authors_do(kind, name, wrong, counts_as):
    scheme = Kerple(2, kind=kind)
    one, other = (at(scheme, [0, 1, 5], PARAMS | {name: np.full(2, v)}) for v in (wrong, counts_as))
    np.testing.assert_array_equal(one, other)
    assert np.all(one <= 0)


def test_a_large_p_is_not_limited_in_the_logarithmic_form():
    found = at(Kerple(1), [1], {"p": np.asarray([7.0]), "a": np.asarray([1.0])})
    np.testing.assert_allclose(found, [[-7 * math.log(2)]], rtol=4 * ULP)


@pytest.mark.parametrize("kind", ["log", "power"])
def test_first_values_are_the_authors(kind):
    first = posenc.init_params(Kerple(4000, kind=kind))
    for name, high in (("p", 2), ("a", 1)):
        values = first[name]
        assert 0.01 <= values.min() < 0.02 * high
        assert 0.99 * high < values.max() < high
        # The mean of 4000 uniform numbers is off by 5 of its standard deviations at most.
        assert abs(values.mean() - (0.01 + high) / 2) < 5 * high / math.sqrt(12 * 4000)


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
@pytest.mark.parametrize("kind", ["log", "power"])
def test_gradients_are_finite_near_and_far(kind):
    import torch

    params = {"p": torch.tensor([2.0, 0.5, 0.0]), "a": torch.tensor([1.0, 0.02, 0.5])}
    for value in params.values():
        value.requires_grad_()
    pos = torch.tensor([0, 1, -(2**30), 2**30 - 1])
    bias = posenc.bias(Kerple(3, kind=kind), pos, pos, params)
    assert torch.all(torch.isfinite(bias))
    assert torch.all(torch.diagonal(bias, dim1=1, dim2=2) == 0)
    bias.sum().backward()
    for value in params.values():
        assert torch.all(torch.isfinite(value.grad))
    assert params["p"].grad[2] == 0  # below the limit
    assert torch.all(params["p"].grad[:2] != 0)


def test_wrong_options():
    with pytest.raises(ValueError, match=r"unknown kind 'linear'; accepted: log, power"):
        Kerple(2, kind="linear")
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        Kerple(0)
    with pytest.raises(ValueError, match="no option 'kind'"):
        posenc.make("kerple_log", num_heads=2, kind="power")
