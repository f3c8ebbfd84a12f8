"""Models whose layers are all alike, beside their configurations and code in transformers."""

from __future__ import annotations

import numpy as np
import pytest
from sample import long

import posenc
from posenc import presets
from posenc.hf import from_hf

SIZES = {"num_heads": 12, "head_dim": 192, "dim": 64, "max_len": 32, "train_len": 64, "layers": 2}
TOLERANCE = 2e-6  # differences of float32 numbers up to 16, whose spacing is 1e-6
UNIFORM = [
    "bloom", "deepseek_v3", "falcon_rw", "gpt2", "gptj", "llama", "llama3", "mpt", "neox", "opt",
    "phi3", "qwen2_vl", "qwen3_vl", "t5",
]  # fmt: skip


@pytest.mark.parametrize("name", UNIFORM)
def test_each_is_made_from_sizes(name):
    scheme = getattr(presets, name)(**SIZES)
    assert isinstance(scheme, posenc.PositionScheme)
    assert name not in presets.PLANS


def test_an_option_that_is_not_there():
    with pytest.raises(ValueError, match=r"llama3 has no option 'bas' .did you mean 'base'"):
        presets.llama3(**SIZES, bas=3)


def test_options_by_hand():
    assert presets.llama3(head_dim=64, factor=None) == posenc.RoPE(64, 500_000.0)
    assert presets.llama3(head_dim=64).scaling.train_len == 8192
    assert presets.gptj(head_dim=256).rotary_dim == 64
    assert presets.gptj(head_dim=16).rotary_dim == 16
    assert presets.neox(head_dim=96).rotary_dim == 24
    assert presets.t5(num_heads=2).scale(64) == 1
    assert presets.t5(num_heads=2, causal=True) == posenc.T5Bias(2, causal=True, scaled=False)
    assert presets.opt(dim=8) == posenc.Learned(2048, 8, offset=2)
    assert presets.gpt2(dim=8) == posenc.Learned(1024, 8)
    assert presets.mpt(num_heads=4, max_bias=6.0) == posenc.ALiBi(4, max_bias=6.0)
    assert presets.falcon_rw(num_heads=2, head_dim=64).slopes == (2.0**-7, 2.0**-11)
    for name in ("gpt2", "opt"):  # the width of a model follows from its heads, as in make
        made = getattr(presets, name)(num_heads=4, head_dim=16, max_len=32)
        assert (made.max_len, made.dim) == (32, 64)


def configuration(name, **options):
    return getattr(pytest.importorskip("transformers"), f"{name}Config")(**options).to_dict()


@long
def test_rotation_is_that_of_the_configuration():
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1,
    }  # fmt: skip
    llama3 = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert from_hf(configuration("Llama")) == presets.llama(head_dim=128)
    assert from_hf(configuration("Phi3")) == presets.phi3(head_dim=96)
    assert from_hf(configuration("GPTJ")) == presets.gptj(head_dim=256)
    assert from_hf(configuration("GPTNeoX")) == presets.neox(head_dim=96)
    made = from_hf(configuration("Llama", rope_parameters=llama3))
    assert made == presets.llama3(head_dim=128)
    made, own = from_hf(configuration("DeepseekV3", rope_parameters=yarn)), presets.deepseek_v3()
    assert (made.base, made.layout, made.scaling) == (own.base, own.layout, own.scaling)
    assert (made.head_dim, own.head_dim, own.rotary_dim) == (64, 128 + 64, 64)


@long
@pytest.mark.parametrize("heads", [8, 12])
def test_slopes_are_those_of_the_models(heads):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    keys = np.arange(20)

    def at_the_last_query(scheme):
        return np.asarray(posenc.bias(scheme, keys[-1:], keys)).reshape(heads, 20)

    def up_to_a_number_a_row(theirs):
        theirs = theirs.reshape(heads, 20).numpy()
        return theirs - theirs[:, -1:]

    theirs = build_alibi_tensor(torch.ones(1, 20), heads, torch.float32)
    own = at_the_last_query(presets.bloom(num_heads=heads))
    np.testing.assert_allclose(own, up_to_a_number_a_row(theirs), atol=TOLERANCE)
    falcon = at_the_last_query(presets.falcon_rw(num_heads=heads, head_dim=64))
    np.testing.assert_allclose(falcon, up_to_a_number_a_row(theirs / 8), atol=TOLERANCE)
    for most in (8, 6):
        theirs = build_mpt_alibi_tensor(heads, 20, most)
        own = at_the_last_query(presets.mpt(num_heads=heads, max_bias=float(most)))
        np.testing.assert_allclose(own, up_to_a_number_a_row(theirs), atol=TOLERANCE)
