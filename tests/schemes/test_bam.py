"""BAM: numbers from ``-(e^s |j - i - mu| + 1e-5)**beta``, and the priors that it contains."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import HAS

import posenc
from posenc.schemes import BAM, LogScale, Sum

ULP = 2.0**-52  # of float64
POS = np.asarray([0, 3, 7, 100, 2**20])
PARAMS = {"s": np.asarray([-0.5, 0.25, -3.0]), "beta": np.asarray([1.5, 0.5, -0.75])}


def formula(rel, s, beta, mu=0.0, slope="inside"):
    if slope == "outside":
        return -math.exp(s) * (abs(rel - mu) + 1e-5) ** beta
    return -((math.exp(s) * abs(rel - mu) + 1e-5) ** beta)


def expected(params, slope="inside"):
    theta = params.get("theta", np.zeros(3))
    heads = zip(params["s"], params["beta"], 2 * np.sinh(theta), strict=True)
    return [
        [[formula(k - q, s, beta, mu, slope) for k in POS.tolist()] for q in POS.tolist()]
        for s, beta, mu in heads
    ]


@pytest.mark.parametrize("slope", ["inside", "outside"])
@pytest.mark.parametrize("theta", [None, [0.0, 0.5, -1.25]])
def test_it_is_the_formula(slope, theta):
    params = PARAMS if theta is None else PARAMS | {"theta": np.asarray(theta)}
    found = posenc.bias(BAM(3, learned_mu=theta is not None, slope=slope), POS, POS, params)
    np.testing.assert_allclose(found, expected(params, slope), rtol=16 * ULP)


def test_numbers_by_hand():
    """A Gaussian of width 2 around the third token before: ``2 sinh(theta) = -3``."""
    params = {"s": np.log([0.5]), "beta": np.asarray([2.0]), "theta": np.arcsinh([-1.5])}
    found = posenc.bias(BAM(1, learned_mu=True), np.asarray([10]), np.asarray([7, 9, 3]), params)
    np.testing.assert_allclose(found[0, 0], [0, -1, -4], atol=5e-5)


@pytest.mark.parametrize("heads", [4, 6])
def test_it_starts_as_alibi(heads):
    bam, alibi = BAM(heads), posenc.ALiBi(heads)
    first = posenc.init_params(bam)
    assert set(first) == {"s", "beta"}
    found = posenc.bias(bam, POS, POS, first)
    np.testing.assert_allclose(found, posenc.bias(alibi, POS, POS) - 1e-5, rtol=1e-6)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, heads, 9, 8))
    one, other = (posenc.attention(q, k, v, s, p, True) for s, p in ((bam, first), (alibi, {})))
    np.testing.assert_allclose(one, other, atol=1e-6)  # softmax does not see 1e-5


def test_the_power_0_is_nope_and_a_negative_one_prefers_far_keys():
    params = PARAMS | {"beta": np.asarray([0.0, 0.0, -0.5])}
    found = posenc.bias(BAM(3), np.asarray([50]), np.arange(50), params)[:, 0]
    np.testing.assert_array_equal(found[:2], np.full((2, 50), -1.0))
    assert np.all(np.diff(found[2]) < 0)  # falls towards the query


@pytest.mark.parametrize(("wrong", "counts_as"), [(50.0, 3.0), (-50.0, -6.0)])
def test_every_bias_is_finite(wrong, counts_as):
    far = np.asarray([-(2**30), 0, 2**30 - 1])
    one, other = (
        posenc.bias(BAM(1), far, far, {"s": np.float32([7]), "beta": np.float32([beta])})
        for beta in (wrong, counts_as)
    )
    assert np.all(np.isfinite(one))
    np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_gradients_are_finite_at_the_centre_and_far():
    import torch

    params = {"s": [-1.0, -1.0, -1.0], "beta": [1.0, 0.25, -1.0], "theta": [0.0, 0.0, 0.0]}
    params = {name: torch.tensor(v, requires_grad=True) for name, v in params.items()}
    pos = torch.tensor([0, 1, -(2**30), 2**30 - 1])
    posenc.bias(BAM(3, learned_mu=True), pos, pos, params).sum().backward()
    for value in params.values():
        assert torch.all(torch.isfinite(value.grad))
    assert torch.all(params["beta"].grad != 0)


@pytest.mark.skipif(not HAS["jax"], reason="JAX is not installed")
def test_the_centre_has_no_derivative_in_jax_either():
    import jax

    def at_the_centre(theta):
        params = {"s": jax.numpy.zeros(1), "beta": jax.numpy.full(1, 0.5), "theta": theta}
        pos = jax.numpy.asarray([5])
        return posenc.bias(BAM(1, learned_mu=True), pos, pos, params).sum()

    assert not jax.grad(at_the_centre)(jax.numpy.zeros(1)).any()


def test_the_authors_scalable_softmax():
    """``s_h ln(i + 1) q.k / sqrt(D) + b``: the bias is not multiplied."""
    scheme = Sum(BAM(2), LogScale("ssmax", num_heads=2))
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 1, 2, 5, 4))
    params = posenc.init_params(scheme)
    weights = np.zeros((2, 5, 5))
    for h, i in np.ndindex(2, 5):
        s, beta = (float(params[f"0_{name}"][h]) for name in ("s", "beta"))
        content = k[0, h, : i + 1] @ q[0, h, i] / 2 * float(params["1_s"][h]) * math.log(i + 1)
        scores = content + [formula(j - i, s, beta) for j in range(i + 1)]
        weights[h, i, : i + 1] = np.exp(scores) / np.exp(scores).sum()
    found = posenc.attention(q, k, v, scheme, params, causal=True)
    np.testing.assert_allclose(found[0], weights @ v[0], atol=1e-6)


def test_wrong_options():
    with pytest.raises(ValueError, match=r"unknown slope 'beside' .*accepted: inside, outside"):
        BAM(2, slope="beside")
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        BAM(0)
    with pytest.raises(ValueError, match="init_beta"):
        BAM(2, init_beta=math.inf)
