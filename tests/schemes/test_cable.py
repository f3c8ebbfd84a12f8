"""CABLE: the formula, what it shares with FoX, and the scale of the authors' code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.schemes import CABLE, FoX
from posenc.testing.tolerances import ATTENTION_TOL, FLOAT32_TOL, assert_near


def test_a_bias_sums_softplus():
    params = {"w": np.asarray([[1, -2]], np.float32), "b": np.asarray([0.5], np.float32)}
    x = np.asarray([[[0.5, 0.25], [-1, 2], [3, 0]]], np.float32)
    # -ln(1 + exp(z)) of 0.5, -4.5 and 3.5.
    gates = -0.97407698418010668, -0.011047744848593816, -3.5297504182726206
    _, key = posenc.features(CABLE(1, 2), params, posenc.Tokens(x=x))
    assert_near(key.features["c"][0, 0], np.cumsum(gates), FLOAT32_TOL)
    # Weights of equal products and unit vectors: of the first key, exp of the gates after it.
    zero, v = np.zeros((1, 1, 3, 8), np.float32), np.eye(3, dtype=np.float32)[None, None]
    row = np.exp([gates[1] + gates[2], gates[2], 0])
    tokens = posenc.Tokens(x=x)
    found = posenc.attention(zero, zero, v, CABLE(1, 2), params, True, tokens=tokens)[0, 0, 2]
    assert_near(found, row / row.sum(), FLOAT32_TOL)


def test_it_is_fox_with_the_opposite_weights():
    params = posenc.init_params(CABLE(4, 6))
    assert params["w"].std() > 0
    assert params["b"].tolist() == [0, 0, 0, 0]
    opposite = {"w": -params["w"], "b": -params["b"]}
    q, k, v = (normal((2, 4, 12, 8), n, "float32") for n in (1, 2, 3))
    x = normal((2, 12, 6), 4, "float32")
    found = posenc.attention(q, k, v, CABLE(4, 6), params, True, tokens=posenc.Tokens(x=x))
    expected = posenc.attention(q, k, v, FoX(4, 6), opposite, True, tokens=posenc.Tokens(x=x))
    np.testing.assert_array_equal(found, expected)


def test_as_released_scores_have_no_scale():
    scaled, released = CABLE(4, 6), CABLE(4, 6, scaled=False)
    assert (scaled.scale(64), released.scale(64)) == (1 / 8, 1)
    params, x = posenc.init_params(scaled), normal((2, 12, 6), 4)
    q, k, v = (normal((2, 4, 12, 16), n) for n in (1, 2, 3))
    found = posenc.attention(q, k, v, released, params, True, tokens=posenc.Tokens(x=x))
    expected = posenc.attention(4 * q, k, v, scaled, params, True, tokens=posenc.Tokens(x=x))
    assert_near(found, expected, ATTENTION_TOL["float64"])


def test_wrong_options():
    with pytest.raises(TypeError, match="scaled must be True or False, got 'no'"):
        CABLE(4, 6, scaled="no")
    with pytest.raises(ValueError, match="hidden_dim must be at least 1, got 0"):
        CABLE(4, 0)
    assert math.isclose(CABLE(4, 6).scale(16), 0.25)
