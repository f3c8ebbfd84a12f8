"""Plans of configurations as they are released, without transformers."""

from __future__ import annotations

import dataclasses

import pytest

import posenc
from posenc import presets
from posenc.hf.layer_schemes import PerLayerT5Bias
from posenc.schemes import PI, Inkling, LogScale, MRoPE, Sink, Sum, YaRN

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "rope_theta": 1e6}

GEMMA_3 = {  # 4B, the keys that matter, with fewer layers
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 256,
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}


def test_gemma_3_as_released():
    plan = presets.from_hf_config(GEMMA_3)
    near = posenc.RoPE(256, 10_000.0)
    full = posenc.RoPE(256, 1_000_000.0, scaling=PI(8.0))
    assert plan.schemes == (near,) * 5 + (full, near)
    assert plan.windows == (1024,) * 5 + (None, 1024)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": "LG"},
            presets.exaone4(layers=5, head_dim=16, base=1e6, window=9, every=2),
        ),
        (
            {"model_type": "exaone4", "sliding_window": None},
            presets.exaone4(layers=5, head_dim=16, base=1e6, window=None),
        ),
        (
            {"model_type": "cohere2", "sliding_window": 9, "sliding_window_pattern": 3},
            presets.cohere2(layers=5, head_dim=16, base=1e6, window=9, every=3),
        ),
        (
            {"model_type": "cohere2", "sliding_window": None},
            presets.cohere2(layers=5, head_dim=16, base=1e6, window=None),
        ),
        (
            {"model_type": "olmo3", "sliding_window": 9},
            presets.olmo3(layers=5, head_dim=16, base=1e6, window=9),
        ),
        (
            {
                "model_type": "gemma4_text", "sliding_window": 9, "rope_theta": None,
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4},
                    "full_attention": {
                        "rope_type": "proportional", "rope_theta": 1e6,
                        "partial_rotary_factor": 0.25,
                    },
                },
            },
            presets.gemma4(layers=5, head_dim=16, window=9),  # the last layer is full
        ),
        (
            {"model_type": "smollm3", "no_rope_layer_interval": 2},
            presets.smollm3(layers=5, head_dim=16, base=1e6, every=2),
        ),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 9, "floor_scale": 7},
            presets.irope(layers=5, head_dim=16, base=1e6, chunk=9, train_len=7),
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_older_keys_for_which_layers(config, expected):
    assert presets.from_hf_config({**SMALL, "num_hidden_layers": 5, **config}) == expected


def test_layers_that_are_listed_have_priority():
    config = {
        **SMALL,
        "num_hidden_layers": 2,
        "no_rope_layers": [0, 1],
        "no_rope_layer_interval": 2,
        "attention_chunk_size": None,
    }
    smol = presets.from_hf_config({**config, "model_type": "smollm3"})
    assert smol.schemes == (posenc.NoPE(), posenc.RoPE(16, 1e6))
    untuned = {"model_type": "llama4_text", "attn_temperature_tuning": False}
    assert presets.from_hf_config({**config, **untuned}).schemes[0] == posenc.NoPE()
    assert presets.from_hf_config({**config, "model_type": "llama4_text"}).schemes[0] == LogScale()
    types = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
    oss = presets.from_hf_config({**config, **types, "model_type": "gpt_oss"})
    assert oss.schemes == (Sink(posenc.RoPE(16, 1e6), 4),) * 2
    assert oss.windows == (None, 9)


def test_a_mask_of_images_alone_is_no_matter_of_a_plan():
    config = {**SMALL, "model_type": "gemma4_text", "num_hidden_layers": 2, "sliding_window": 9}
    images = {**config, "use_bidirectional_attention": "vision"}  # Gemma 4 26B and 31B
    assert presets.from_hf_config(images) == presets.from_hf_config(config)
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        presets.from_hf_config({**config, "use_bidirectional_attention": "all"})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "bloom", "n_head": 12, "n_layer": 2}, presets.bloom(num_heads=12)),
        (
            {"model_type": "bloom", "num_attention_heads": 16, "n_layer": 2},  # as of 560M
            presets.bloom(num_heads=16),
        ),
        (
            {
                "model_type": "mpt", "n_heads": 12, "n_layers": 2,
                "attn_config": {"alibi": True, "alibi_bias_max": 6},
            },
            presets.mpt(num_heads=12, max_bias=6.0),
        ),
        (
            {
                "model_type": "mpt", "n_layers": 2, "attn_config": {"alibi": False},
                "max_seq_len": 9, "d_model": 8,
            },
            posenc.Learned(9, 8),
        ),
        (
            {
                "model_type": "mpt", "n_layers": 2, "attn_config": {"alibi": False},
                "learned_pos_emb": False,
            },
            posenc.NoPE(),
        ),
        (
            {**SMALL, "model_type": "falcon", "alibi": True, "num_hidden_layers": 2},
            presets.falcon_rw(num_heads=4, head_dim=16),
        ),
        (
            {**SMALL, "model_type": "falcon", "alibi": False, "num_hidden_layers": 2},
            posenc.RoPE(16, 1e6),
        ),
        (
            {"model_type": "gpt2", "n_positions": 9, "n_embd": 8, "n_layer": 2},
            presets.gpt2(max_len=9, dim=8),
        ),
        (
            {
                "model_type": "opt", "max_position_embeddings": 9, "hidden_size": 8,
                "num_hidden_layers": 2,
            },
            presets.opt(max_len=9, dim=8),
        ),
        (
            {
                **SMALL, "model_type": "ministral3", "num_hidden_layers": 2, "sliding_window": None,
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                    "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.2,
                },
            },
            Sum(
                posenc.RoPE(16, 1e6, scaling=YaRN(4.0, 64)),
                LogScale("ministral3", train_len=64, beta=0.2),
            ),
        ),
        (
            {"model_type": "gptj", "n_embd": 512, "n_head": 2, "n_layer": 2, "rotary_dim": 64},
            presets.gptj(head_dim=256),
        ),
        (
            {
                "model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4,
                "rotary_pct": 0.25, "rotary_emb_base": 10000, "num_hidden_layers": 2,
            },
            presets.neox(head_dim=16),
        ),
        (
            {
                "model_type": "deepseek_v3", "hidden_size": 64, "num_attention_heads": 4,
                "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "num_hidden_layers": 2,
                "rope_theta": 10000.0,
                "rope_scaling": {
                    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                },
            },
            presets.deepseek_v3(),
        ),
        (
            {  # as released, with the keys of text beside those of images
                "model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28,
                "num_hidden_layers": 2, "rope_theta": 1e6, "sliding_window": 32768,
                "use_sliding_window": False, "vision_config": {"model_type": "qwen2_vl"},
                "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            },
            presets.qwen2_vl(),
        ),
        (
            {
                "model_type": "qwen3_vl",
                "text_config": {
                    "model_type": "qwen3_vl_text", "head_dim": 128, "num_hidden_layers": 2,
                    "rope_theta": 5e6, "rope_scaling": {
                        "rope_type": "default", "mrope_section": [24, 20, 20],
                        "mrope_interleaved": True,
                    },
                },
            },
            presets.qwen3_vl(),
        ),
        (
            {  # without sections: those of transformers
                "model_type": "glm4v_text", "head_dim": 128, "num_hidden_layers": 2,
                "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
            MRoPE(128, (8, 12, 12), rotary_dim=64, pairing="interleaved"),
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_layers_that_are_all_alike(config, expected):
    assert presets.from_hf_config(config).schemes == (expected,) * 2


def test_t5_has_an_encoder_and_a_decoder():
    small = {"model_type": "t5", "d_model": 512, "num_heads": 8, "num_layers": 2}  # as released
    encoder, decoder = presets.t5(num_heads=8), presets.t5(num_heads=8, causal=True)
    plan = presets.from_hf_config(small)
    assert plan.schemes == (encoder, encoder, decoder, decoder)
    assert plan.owners == (0, 0, 1, 1)  # each stack learns one table
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    plan = presets.from_hf_config({**small, **buckets, "num_decoder_layers": 1})
    wide = presets.t5(num_heads=8, num_buckets=8, max_distance=20)
    assert plan.schemes[:2] == (wide, wide)
    assert plan.schemes[2:] == (dataclasses.replace(wide, causal=True),)
    own = presets.from_hf_config({**small, "model_type": "umt5"})
    assert own.owners == (0, 1, 2, 3)
    assert own.schemes[3] == PerLayerT5Bias(8, causal=True, scaled=False)
    alone = {**small, "model_type": "mt5", "is_encoder_decoder": False}
    assert presets.from_hf_config(alone).schemes == (encoder, encoder)
    assert presets.from_hf_config({**alone, "is_decoder": True}).schemes == (decoder, decoder)


def test_gpt_neo_by_groups_of_layers():
    config = {
        "model_type": "gpt_neo", "max_position_embeddings": 9, "hidden_size": 8, "window_size": 3,
        "attention_types": [[["global", "local"], 2], [["local"], 1]],
    }  # fmt: skip
    plan = presets.from_hf_config(config)
    assert plan.schemes == (posenc.Learned(9, 8),) * 5
    assert plan.windows == (None, 3, None, 3, 3)


def test_latent_attention():
    latent = {
        "num_hidden_layers": 1, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "hidden_size": 64,
        "num_attention_heads": 4,
    }  # fmt: skip
    plain = {**latent, "rope_theta": 1e4}
    rope = posenc.RoPE(12, 1e4, "interleaved", rotary_dim=8)
    half = dataclasses.replace(rope, layout="half")
    for kind, expected in (("deepseek_v2", rope), ("youtu", rope), ("minicpm3", half)):
        assert presets.from_hf_config({**plain, "model_type": kind}).schemes == (expected,)
    given = {**plain, "model_type": "youtu", "rope_interleave": False}
    assert presets.from_hf_config(given).schemes == (half,)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn |= {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.2}
    scaled = dataclasses.replace(rope, scaling=YaRN(4.0, 64))
    given = {**latent, "model_type": "mistral4", "rope_parameters": yarn}
    assert presets.from_hf_config(given).schemes == (
        Sum(scaled, LogScale("ministral3", train_len=64, beta=0.2)),
    )


def test_a_text_model_without_rotation_in_a_model_of_images():
    text = {
        "model_type": "opt", "max_position_embeddings": 64, "hidden_size": 32,
        "num_hidden_layers": 2,
    }  # fmt: skip
    expected = presets.from_hf_config(text)
    assert presets.from_hf_config({"model_type": "blip-2", "text_config": text}) == expected


def test_inkling_by_lists_of_layers():
    text = {
        "model_type": "inkling_text", "num_hidden_layers": 3, "hidden_size": 64, "d_rel": 16,
        "num_attention_heads": 4, "swa_num_attention_heads": 2, "sliding_window_size": 9,
        "rel_extent": 20, "local_layer_ids": [0, 2], "log_scaling_n_floor": 50,
    }  # fmt: skip
    plan = presets.from_hf_config({"model_type": "inkling_mm_model", "text_config": text})
    near, full = Inkling(2, 64, extent=9), Inkling(4, 64, extent=20)
    assert plan.schemes == (near, Sum(full, LogScale("inkling", train_len=50)), near)
    assert plan.windows == (9, None, 9)
    del text["local_layer_ids"], text["log_scaling_n_floor"]
    plan = presets.from_hf_config({**text, "num_hidden_layers": 6})
    assert plan.schemes == (near,) * 5 + (full,)
    made = presets.inkling2(layers=6, num_heads=2, hidden_dim=64, window=9, extent=20)
    text |= {"model_type": "inkling2_text", "num_attention_heads": 2, "num_hidden_layers": 6}
    assert presets.from_hf_config(text) == made
    assert made.schemes[5] == Sink(
        Sum(Inkling(2, 64, extent=20, version=2), LogScale("inkling", train_len=128_000)),
        2, per_query=True, hidden_dim=64,
    )  # fmt: skip
    assert presets.inkling(layers=3, every=3, num_heads=2, head_dim=32, window=None).windows == (
        (None,) * 3
    )
    with pytest.raises(ValueError, match="unknown type in layer_types 'full_attention'"):
        presets.from_hf_config({**text, "layer_types": ["full_attention"]})


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"model_type": "smolm3"},
            ValueError,
            "not known here .did you mean 'smollm3'",
        ),
        ({}, ValueError, "model_type 'None' is not known here"),
        ({"model_type": "bloom"}, ValueError, "n_layer is missing .* of 'bloom'"),
        ({"model_type": "llama"}, ValueError, "num_hidden_layers is missing .* of 'llama'"),
        (
            {"model_type": "llama", "num_hidden_layers": 2, "layer_types": ["full_attention"]},
            ValueError,
            "layer_types must be num_hidden_layers=2, got 1",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 1, "layer_types": ["linear_attention"]},
            ValueError,
            "unknown type in layer_types 'linear_attention'.*sliding_attention",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 2, "rope_thta": 3},
            ValueError,
            "unknown keys: rope_thta",
        ),
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 1, "use_bidirectional_attention": 1},
            ValueError,
            "use_bidirectional_attention",
        ),
        (
            {"model_type": "mpt", "n_layers": 1, "attn_config": {"alibi": False, "rope": True}},
            ValueError,
            "rope in attn_config",
        ),
        (
            {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0]},
            ValueError,
            "no_rope_layers must be a list of num_hidden_layers=3, got",
        ),
        # Without these keys transformers has a window or chunks.
        (
            {"model_type": "mistral", "num_hidden_layers": 2},
            ValueError,
            "sliding_window is missing",
        ),
        (
            {"model_type": "cohere2", "num_hidden_layers": 2},
            ValueError,
            "sliding_window is missing",
        ),
        (
            {"model_type": "llama4_text", "num_hidden_layers": 2},
            ValueError,
            "attention_chunk_size is missing",
        ),
    ],
)
def test_wrong_configurations(config, error, message):
    with pytest.raises(error, match=message):
        presets.from_hf_config({**SMALL, **config})


def test_what_is_no_configuration():
    with pytest.raises(TypeError, match="config must be a configuration or its dictionary, got 3"):
        presets.from_hf_config(3)
