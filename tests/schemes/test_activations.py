"""Softplus, sigmoid and leaky ReLU on each library: values beside float64, and derivatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import FRAMEWORKS

from posenc.schemes.activations import leaky_relu, log_sigmoid, sigmoid, softplus
from posenc.testing.tolerances import UNIT

FUNCTIONS = {
    "softplus": softplus,
    "log_sigmoid": log_sigmoid,
    "sigmoid": sigmoid,
    "leaky_relu": lambda z, xp: leaky_relu(z, 0.01, xp),
}
AT_0 = {"softplus": 0.5, "log_sigmoid": 0.5, "sigmoid": 0.25, "leaky_relu": 0.01}
"""Their derivatives."""
DIFFERENTIABLE = [name for name in ("torch", "jax") if name in FRAMEWORKS]
Z = np.concatenate([np.linspace(-80, 80, 641), np.linspace(-0.01, 0.01, 9)]).astype(np.float32)


def exact(name, z):
    """The function and its derivative in float64."""
    e = np.exp(-np.abs(z))
    small, large = e / (1 + e), 1 / (1 + e)
    rising, falling = np.where(z < 0, small, large), np.where(z < 0, large, small)
    if name == "sigmoid":
        return rising, rising * falling
    if name == "leaky_relu":
        return np.where(z > 0, z, 0.01 * z), np.where(z > 0, 1.0, 0.01)
    if name == "softplus":
        return np.maximum(z, 0) + np.log1p(e), rising
    return np.minimum(z, 0) - np.log1p(e), falling


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_small_values_keep_their_digits(name, framework):
    """An exponential and two more operations round by 8 units of the result, at most.

    Without a sigmoid of the library, its logarithm, up to 80, is rounded first.
    """
    found = (
        FRAMEWORKS[framework].evaluate(lambda xp, a: FUNCTIONS[name](a["z"], xp), {"z": Z}).values
    )
    expected = exact(name, Z.astype(np.float64))[0]
    rounding = 8 if framework in DIFFERENTIABLE or name != "sigmoid" else 8 + 80
    assert np.all(np.abs(found - expected) <= rounding * UNIT["float32"] * np.abs(expected))


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name, framework):
    """Also at 0; a rounding is of the largest derivative."""
    run = FRAMEWORKS[framework].gradients
    _, found = run(lambda xp, a: FUNCTIONS[name](a["z"], xp), {"z": Z}, np.ones(Z.shape))
    expected = exact(name, Z.astype(np.float64))[1]
    assert np.max(np.abs(found["z"] - expected)) <= 8 * UNIT["float32"]
    assert math.isclose(found["z"][Z == 0][0], AT_0[name], rel_tol=1e-7)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_softplus_in_float64_is_exact_above_20(framework):
    """PyTorch takes ``z`` itself from 20 on, unless told otherwise."""
    z = np.linspace(15, 45, 61)
    found = FRAMEWORKS[framework].evaluate(lambda xp, a: softplus(a["z"], xp), {"z": z}).values
    assert np.max(np.abs(found / (z + np.log1p(np.exp(-z))) - 1)) <= 4 * UNIT["float64"]
