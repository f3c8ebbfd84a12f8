"""FIRE: numbers by hand from ``MLP(psi(n) / (psi(max(i, L)) + 1e-6))``."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import Case, tensors_of
from frameworks import FRAMEWORKS, Route
from frameworks import route as named
from sample import long
from subjects import normal, params_of

import posenc
from posenc.schemes import FIRE, Sink
from posenc.testing.examples import HEADS
from posenc.testing.tolerances import assert_near

ULP = 2.0**-52
FLOAT64 = 1e-12
NETWORK = {
    "w1": np.asarray([1.0, -2.0]),
    "b1": np.asarray([-0.25, 1.0]),
    "w2": np.asarray([[1.0, 3.0], [-2.0, 0.5]]),
}
PARAMS = {"c": np.asarray(1.0), "len_scale": np.asarray(1.0), **NETWORK}


def expected(i, j, *, c=1.0, length=7.0):
    """Both heads, written out for the two units of ``NETWORK``."""
    x = math.log(1 + c * abs(i - j)) / (math.log(1 + c * max(i, length)) + 1e-6)
    first, second = max(0, x - 0.25), max(0, 1 - 2 * x)
    return [first + 3 * second, -2 * first + 0.5 * second]


def found(scheme, pairs, params):
    return [
        posenc.bias(scheme, np.asarray([i]), np.asarray([j]), params)[:, 0, 0] for i, j in pairs
    ]


PAIRS = [(0, 0), (3, 1), (7, 0), (63, 0), (63, 60), (2, 9), (-4, -6), (10**6, 5)]


def test_the_bias():
    scheme = FIRE(2, hidden=2, init_len=7)
    want = [expected(i, j) for i, j in PAIRS]
    np.testing.assert_allclose(found(scheme, PAIRS, PARAMS), want, rtol=32 * ULP)


def test_at_the_threshold_and_beyond_by_numbers():
    # psi(7) = ln 8 and psi(63) = ln 64: the quotients are 1/3, 1/2 and 1, but for eps.
    scheme = FIRE(2, hidden=2, init_len=7)
    pairs = [(3, 2), (63, 56), (63, 0)]
    want = [[1 / 12 + 1, -1 / 6 + 1 / 6], [1 / 4, -1 / 2], [3 / 4, -3 / 2]]
    # A quotient is off by at most eps / ln 8 of itself, the network's slope is at most 7.
    np.testing.assert_allclose(found(scheme, pairs, PARAMS), want, rtol=0, atol=7e-6 / math.log(8))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_threshold_and_c_count_without_sign(sign):
    params = PARAMS | {"c": np.asarray(sign * 0.5), "len_scale": np.asarray(sign * 3.0)}
    scheme = FIRE(2, hidden=2, init_len=7)
    want = [expected(i, j, c=0.5, length=21.0) for i, j in PAIRS]
    np.testing.assert_allclose(found(scheme, PAIRS, params), want, rtol=32 * ULP)


def test_the_last_offset_is_an_option_that_softmax_does_not_see():
    plain, whole = FIRE(2, hidden=2, init_len=7), FIRE(2, hidden=2, init_len=7, offset=True)
    params = PARAMS | {"b2": np.asarray([0.5, -2.0])}
    q = k = np.arange(6)
    extra = posenc.bias(whole, q, k, params) - posenc.bias(plain, q, k, PARAMS)
    np.testing.assert_allclose(
        extra, np.broadcast_to([[[0.5]], [[-2.0]]], (2, 6, 6)), rtol=16 * ULP
    )
    assert set(posenc.init_params(whole)) - set(posenc.init_params(plain)) == {"b2"}
    x = np.random.default_rng(0).standard_normal((3, 1, 2, 6, 8))
    one = posenc.attention(*x, plain, PARAMS, causal=True)
    np.testing.assert_allclose(
        posenc.attention(*x, whole, params, causal=True), one, rtol=0, atol=64 * ULP
    )
    # A sink does.
    sink = {"sink": np.zeros(2)}
    beside = posenc.attention(*x, Sink(plain), PARAMS | sink, causal=True)
    other = posenc.attention(*x, Sink(whole), params | sink, causal=True)
    assert np.max(np.abs(beside - other)) > 0.01


def test_first_values():
    first = posenc.init_params(FIRE(64, init_c=0.2, init_len=100))
    assert first["c"] == np.float32(0.2)
    assert first["len_scale"] == 1
    assert {name: a.shape for name, a in first.items()} == {
        "c": (), "len_scale": (), "w1": (32,), "b1": (32,), "w2": (64, 32),
    }  # fmt: skip
    for name, most in (("w1", 1), ("b1", 1), ("w2", 1 / math.sqrt(32))):
        assert 0.7 * most < np.max(np.abs(first[name])) <= most


def test_the_threshold_fits_the_training_length():
    sizes = {"num_heads": 2, "head_dim": 8}
    assert posenc.make("fire", **sizes).init_len == 512
    assert posenc.make("fire", **sizes, train_len=64).init_len == 16
    assert posenc.make("fire", **sizes, train_len=2**20).init_len == 512
    assert posenc.make("fire", **sizes, train_len=64, init_len=5).init_len == 5


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"init_c": -1}, "init_c must be finite and greater than 0, got -1"),
        ({"init_len": 0}, "init_len must be finite and greater than 0, got 0"),
    ],
)
def test_wrong_options(options, error):
    with pytest.raises(ValueError, match=error):
        FIRE(2, **options)


@long
@pytest.mark.parametrize("framework", [f for f in FRAMEWORKS.values() if f.differentiable], ids=str)
@pytest.mark.parametrize("hidden", [3, 20])
def test_many_units_at_a_time_are_their_sum(framework, hidden):
    """The bias of the reference in NumPy, unit by unit, and its gradients by differences."""
    scheme = FIRE(HEADS, hidden=hidden, init_len=7)
    case = Case(
        {"causal": True, "tokens": posenc.Tokens(pos=np.stack([np.arange(9), 3 * np.arange(9)]))},
        q_len=9,
        k_len=9,
    )
    tensors, params = tensors_of(scheme, case), params_of(scheme, dtype="float64")
    d_out = normal((2, HEADS, 9, tensors["v"].shape[-1]), 9)
    call = scheme, tensors, params
    chunked = Route(framework, "chunked")
    out, found = chunked.gradients(*call, d_out, dtype="float64", **case.options)
    plain = named("numpy", "reference")
    assert_near(out, plain.attend(*call, dtype="float64", **case.options), FLOAT64)
    for name in ("w1", "b1", "w2"):
        step = 1e-6 * normal(params[name].shape, 3)
        ends = [
            plain.attend(
                scheme, tensors, params | {name: params[name] + sign * step}, dtype="float64",
                **case.options,
            )
            for sign in (1, -1)
        ]  # fmt: skip
        change = np.sum((ends[0] - ends[1]) * d_out) / 2
        np.testing.assert_allclose(np.sum(found[name] * step), change, rtol=1e-5, atol=1e-12)
