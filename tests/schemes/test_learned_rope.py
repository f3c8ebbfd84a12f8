"""LearnedRoPE: its formula, its bound far away, and that it starts as RoPE."""

from __future__ import annotations

from importlib.util import find_spec

import mpmath
import numpy as np
import pytest
from frameworks import FRAMEWORKS
from sample import long, some

import posenc
from posenc.layers import LayerPlan
from posenc.schemes import LearnedRoPE, Proportional, RoPE, YaRN

FAR = [0, 1, -1, 257, 10**5 + 1, -(2**20) - 3, 2**24]
LOG_SCALE = np.asarray([0.01, -0.5, 1.0, -0.0625], np.float32)


def turned(scheme, pos, log_scale, dtype, name="numpy"):
    """Cosines and sines ``(L, n)``, as float64."""
    n = len(scheme.frequencies())
    x = np.zeros((len(pos), 2 * n))
    x[:, :n] = 1

    def program(xp, arrays):
        params = {"log_scale": arrays["log_scale"]}
        return posenc.transform(
            scheme, arrays["x"], arrays["pos"], params=params, role="key", xp=xp
        )

    arrays = {"x": x.astype(dtype), "pos": np.asarray(pos), "log_scale": log_scale.astype(dtype)}
    found = FRAMEWORKS[name].evaluate(program, arrays).values.astype(float)
    return found[:, :n], found[:, n:]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", some(FRAMEWORKS, ["numpy", "torch"], long))
def test_formula_and_bound(name, dtype):
    if dtype not in FRAMEWORKS[name].dtypes:
        pytest.skip(f"{name} has no {dtype}")
    scheme = LearnedRoPE(8)
    cos, sin = turned(scheme, FAR, LOG_SCALE, dtype, name)
    exact, unit = (1.5e-7, 2.0**-21) if dtype == "float32" else (4e-16, 2.0**-50)
    with mpmath.workdps(40):
        for n, pos in enumerate(FAR):
            for k, more in enumerate(LOG_SCALE):
                f, more = pos * mpmath.power(10, -k), mpmath.mpf(float(more))
                angle = f * mpmath.exp(more)
                # RoPE's own error twice, because a sum of two products has it twice.
                bound = 2 * exact + unit * abs(f * mpmath.expm1(more))
                assert abs(cos[n, k] - mpmath.cos(angle)) <= bound
                assert abs(sin[n, k] - mpmath.sin(angle)) <= bound


def test_all_layers_share_the_frequencies():
    assert LayerPlan.of(LearnedRoPE(8), 3).owners == (0, 0, 0)


@pytest.mark.parametrize("options", [{}, {"scaling": YaRN(16, 64)}, {"rotary_dim": 4}])
def test_it_starts_as_rope(options):
    learned, rope = LearnedRoPE(8, **options), RoPE(8, **options)
    x = np.random.default_rng(0).standard_normal((len(FAR), 8)).astype(np.float32)
    pos, params = np.asarray(FAR), posenc.init_params(learned)
    np.testing.assert_array_equal(params["log_scale"], np.zeros(len(rope.frequencies())))
    np.testing.assert_array_equal(
        posenc.transform(learned, x, pos, params=params, role="query"),
        posenc.transform(rope, x, pos, role="query"),
    )


def test_the_factor_of_a_scaling_stays():
    scheme = LearnedRoPE(8, scaling=YaRN(16, 64))
    cos, sin = turned(scheme, FAR, LOG_SCALE, "float64")
    np.testing.assert_allclose(np.hypot(cos, sin), scheme.attention_factor, rtol=1e-14)


def test_a_frequency_of_zero_stays_zero():
    cos, sin = turned(LearnedRoPE(8, scaling=Proportional(0.5)), FAR, LOG_SCALE, "float64")
    np.testing.assert_array_equal(cos[:, 2:], 1)
    np.testing.assert_array_equal(sin[:, 2:], 0)


@long  # transformers is imported
@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_mistral_large_4():
    import torch
    from transformers.models.mistral_large4 import modeling_mistral_large4 as released

    parameters = {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2048.0, "attention_factor": 1.0,
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    config = released.MistralLarge4TextConfig(rope_parameters=parameters)
    theirs = released.MistralLarge4TextRotaryEmbedding(config)
    n, pos = len(theirs.inv_freq), np.asarray([0, 1, 100, 5000])
    log_scale = np.random.default_rng(0).normal(0, 0.1, n).astype(np.float32)
    theirs.alpha.copy_(torch.tensor(log_scale))
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), torch.tensor(pos))
    scheme = LearnedRoPE(2 * n, scaling=YaRN(2048.0, 512, attention_factor=1.0))
    # Their angles are float32 products: frequency, exponential and product are rounded.
    bound = 4 * 2.0**-24 * pos.max() * 1.5
    for ours, other in zip(turned(scheme, pos, log_scale, "float64"), (cos, sin), strict=True):
        np.testing.assert_allclose(ours, other[..., :n], rtol=0, atol=bound)
