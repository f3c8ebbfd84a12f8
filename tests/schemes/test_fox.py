"""FoX: gates by the formula, its fixed form, its options."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import FRAMEWORKS
from subjects import normal

import posenc
from posenc.schemes import FoX
from posenc.testing.tolerances import FLOAT32_TOL, UNIT, assert_near

TIMES = (2.0, 8.0, 32.0, 128.0)
DIFFERENTIABLE = [name for name in ("torch", "jax") if name in FRAMEWORKS]


def weights(scheme, params, x):
    """What each query takes of each key if all products are 0: values are unit vectors."""
    heads, length = scheme.num_heads, x.shape[1]
    zero = np.zeros((1, heads, length, 8), np.float32)
    v = np.broadcast_to(np.eye(length, dtype=np.float32), (1, heads, length, length))
    return posenc.attention(zero, zero, v, scheme, params, True, tokens=posenc.Tokens(x=x))


def test_a_weight_is_the_product_of_the_gates_after_the_key():
    params = {"w": np.asarray([[1, -2]], np.float32), "b": np.asarray([0.5], np.float32)}
    x = np.asarray([[[0.5, 0.25], [-1, 2], [3, 0]]], np.float32)
    # sigmoid of 0.5 - 0.5 + 0.5, of -1 - 4 + 0.5 and of 3 + 0.5; the first reaches no weight.
    _, f1, f2 = 0.6224593312018546, 0.010986942630593188, 0.9706877692486436
    rows = [[1, 0, 0], [f1, 1, 0], [f1 * f2, f2, 1]]
    expected = [np.asarray(row) / sum(row) for row in rows]
    assert_near(weights(FoX(1, 2), params, x)[0, 0], expected, FLOAT32_TOL)


@pytest.mark.parametrize(("bias_init", "memory"), [(0.0, 1.442695), (5.0, 148.912599)])
def test_the_first_gates_remember_so_many_tokens(bias_init, memory):
    scheme = FoX(3, 4, bias_init=bias_init)
    params = posenc.init_params(scheme)
    assert {name: a.shape for name, a in params.items()} == {"w": (3, 4), "b": (3,)}
    _, key = posenc.features(scheme, params, posenc.Tokens(x=np.zeros((1, 1, 4), np.float32)))
    np.testing.assert_allclose(-1 / key.features["c"], memory, rtol=8 * UNIT["float32"] * memory)


def test_a_gate_of_a_large_logit_is_finite():
    params = {"w": np.zeros((3, 4), np.float32), "b": np.asarray([-1000, 0, 1000], np.float32)}
    x = np.zeros((1, 1, 4), np.float32)
    _, key = posenc.features(FoX(3, 4), params, posenc.Tokens(x=x))
    np.testing.assert_allclose(
        key.features["c"][0, :, 0], [-1000, -math.log(2), 0], rtol=4 * UNIT["float32"]
    )


def test_first_weights_are_normal():
    w = posenc.init_params(FoX(64, 64))["w"]
    # 4096 draws: the deviation of their deviation is 0.02 / sqrt(8192), of their mean 0.02 / 64.
    assert abs(w.std() / 0.02 - 1) < 5 / math.sqrt(8192)
    assert abs(w.mean()) < 5 * 0.02 / 64


def test_the_fixed_form_is_alibi():
    scheme, x = FoX(4, 6, fgate_type="fixed", decay_time=(2, 128)), normal((2, 20, 6), 0)
    assert scheme.param_specs() == {}
    # -ln(expm1(1 / T)) of 2, 8, 32 and 128 tokens.
    b = (0.43275212956718857, 2.0162905847632012, 3.4500702130266917, 4.8481214707894003)
    np.testing.assert_allclose(scheme.constants()["b"], b, rtol=1e-14)
    alibi = posenc.ALiBi(4, slopes=[1 / t for t in TIMES])
    q, k, v = (normal((2, 4, 20, 8), n) for n in (1, 2, 3))
    expected = posenc.attention(q, k, v, alibi, causal=True)
    found = posenc.attention(q, k, v, scheme, causal=True, tokens=posenc.Tokens(x=x))
    assert_near(found, expected, 1e3 * UNIT["float64"])  # sums of 20 gates, of up to 10


def test_one_gate_a_head_is_learned():
    scheme = FoX(4, 6, fgate_type="bias_only", decay_time=(2, 128))
    params = posenc.init_params(scheme)
    assert list(params) == ["b"]
    x = normal((1, 9, 6), 0, "float32")
    _, key = posenc.features(scheme, params, posenc.Tokens(x=x))
    steps = np.arange(1, 10) / np.asarray(TIMES)[:, None]
    assert_near(key.features["c"][0], -steps, FLOAT32_TOL)
    assert posenc.init_params(FoX(2, 6, 3.0, "bias_only"))["b"].tolist() == [3, 3]
    short = FoX(1, 6, fgate_type="bias_only", decay_time=(1e-3, 1e-3))  # exp(1000) overflows
    np.testing.assert_allclose(posenc.init_params(short)["b"], -1000)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_logit_of_zero_has_its_derivative(name):
    """Hidden states of padding are 0, and so is ``b`` at first: ``1 - sigmoid(0)`` a token."""
    framework = FRAMEWORKS[name]

    def sums(xp, arrays):
        x = posenc.Tokens(x=xp.zeros((1, 5, 2)))
        return posenc.features(FoX(1, 2), arrays, x, xp=xp)[1].features["c"]

    given = {"w": np.ones((1, 2), np.float32), "b": np.zeros(1, np.float32)}
    _, found = framework.gradients(sums, given, np.ones((1, 1, 5)))
    assert found["b"].tolist() == [(1 + 2 + 3 + 4 + 5) / 2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"hidden_dim": 2.5}, TypeError, "hidden_dim must be an integer, got 2.5"),
        ({"bias_init": math.inf}, ValueError, "bias_init must be finite, got inf"),
        ({"fgate_type": "ful"}, ValueError, "fgate_type 'ful'.*did you mean 'full'.*bias_only"),
        ({"fgate_type": "fixed"}, ValueError, r"needs decay_time=\(T_min, T_max\), got None"),
        ({"decay_time": (1, 2)}, ValueError, "for fgate_type='bias_only' or 'fixed', got 'full'"),
        ({"fgate_type": "fixed", "decay_time": (4, 2)}, ValueError, r"T_min <= T_max, got \(4, 2"),
        ({"fgate_type": "fixed", "decay_time": (0, 2)}, ValueError, "greater than 0, got 0"),
        ({"fgate_type": "fixed", "decay_time": 7}, TypeError, r"\(T_min, T_max\) in tokens, got 7"),
    ],
    ids=str,
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        FoX(**{"num_heads": 2, "hidden_dim": 4, **options})


def test_hidden_states_of_another_width():
    tokens = posenc.Tokens(x=np.zeros((1, 3, 5)))
    with pytest.raises(ValueError, match=r"x has hidden states of width C=5, but FoX with params"):
        posenc.features(FoX(2, 4), posenc.init_params(FoX(2, 4)), tokens)


def test_long_sums_of_numpy_are_rounded_once():
    scheme, x = FoX(2, 2), normal((1, 20000, 2), 0, "float32")
    params = posenc.init_params(scheme)
    wide = {name: a.astype(np.float64) for name, a in params.items()}
    (_, found), (_, exact) = (
        posenc.features(scheme, p, posenc.Tokens(x=x)) for p in (params, wide)
    )
    # A gate of 0.7 has ten roundings of 1, of both signs: 4 sqrt(10 L) together, and the sum one.
    bound = 4 * math.sqrt(10 * 20000) * UNIT["float32"] + 14000 * UNIT["float32"]
    assert np.abs(found.features["c"] - exact.features["c"]).max() < bound
