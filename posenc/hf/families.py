"""What each ``model_type`` of transformers means beyond the keys of its configurations.

To add a model, write one entry: see ``Family``. ``posenc_torch.hf.families`` says where its modules
keep what a scheme replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.hf import layer_schemes, layer_types, whole_plans
from posenc.hf.family import Family

_PLANNED: tuple[tuple[str, Family], ...] = (
    (
        "apertus arcee bitnet flex_olmo granite granitemoe jais2 olmo olmo2 olmoe",
        Family(layer_types.never),
    ),
    ("bloom", Family(plan=whole_plans.bloom)),
    (
        "codegen gptj",
        Family(
            layer_types.never, interleaved=True,
            defaults={"rope_theta": 10_000.0, "rotary_dim": 64},
        ),
    ),
    ("cohere ernie4_5_moe", Family(layer_types.never, interleaved=True)),
    ("cohere2", Family(layer_types.by_pattern(4), rotates=layer_types.near, interleaved=True)),
    (
        "cohere2_moe",
        Family(layer_types.by_pattern(4), rotates=layer_types.near, interleaved=True, head_dim=128),
    ),
    (
        "deepseek_v2 deepseek_v3 glm4_moe_lite youtu",
        Family(
            layer_types.never, scheme=layer_schemes.latent, interleaved=True, scaled_softmax=True,
        ),
    ),
    ("ernie4_5 helium", Family(layer_types.never, interleaved=True, head_dim=128)),
    (
        "ernie4_5_vl_moe_text",
        Family(layer_types.never, sections=(22, 22, 20), interleaved=True, mrope="ernie"),
    ),
    ("exaone4 exaone_moe", Family(layer_types.by_pattern(4), rotates=layer_types.near_if_any)),
    (
        "falcon",
        Family(
            layer_types.never, plan=whole_plans.falcon_rw,
            defaults={"rope_theta": 10_000.0, "max_position_embeddings": 2048},
        ),
    ),
    ("gemma", Family(layer_types.never, head_dim=256, defaults={"rope_theta": 10_000.0})),
    ("gemma2", Family(layer_types.by_pattern(2), head_dim=256, defaults={"rope_theta": 10_000.0})),
    (
        "gemma3_text",
        Family(
            layer_types.by_pattern(6), head_dim=256,
            defaults={
                "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
                "max_position_embeddings": 131_072,
            },
        ),
    ),
    ("gemma4_text gemma4_unified_text", Family(layer_types.gemma4, head_dim=256)),
    ("glm glm4", Family(layer_types.never, interleaved=True, head_dim=128, part=0.5)),
    ("glm4_moe nemotron persimmon phi", Family(layer_types.never, part=0.5)),
    ("glm4v_moe_text", Family(layer_types.never, sections=(8, 12, 12), part=0.5)),
    ("glm4v_text", Family(layer_types.never, sections=(8, 12, 12), interleaved=True)),
    ("gpt2", Family(plan=whole_plans.gpt2)),
    ("gpt_neo", Family(plan=whole_plans.gpt_neo)),
    ("gpt_neox", Family(layer_types.never, part=0.25, defaults={"rotary_emb_base": 10_000.0})),
    ("gpt_oss", Family(layer_types.by_pattern(2), scheme=layer_schemes.with_sink, head_dim=64)),
    ("inkling2_text inkling_text", Family(plan=whole_plans.inkling)),
    ("internlm3 minimax_m2 seed_oss solar_open", Family(layer_types.never, head_dim=128)),
    ("kolibri1", Family(layer_types.by_pattern(5), rotates=layer_types.near_if_any, head_dim=128)),
    (
        "llama",
        Family(
            layer_types.never, defaults={"rope_theta": 10_000.0, "max_position_embeddings": 2048},
        ),
    ),
    (
        "llama4_text",
        Family(
            layer_types.where_rotating, rotates=layer_types.listed, scheme=layer_schemes.llama4,
            interleaved=True, head_dim=128,
        ),
    ),
    ("minicpm3", Family(layer_types.never, scheme=layer_schemes.latent, scaled_softmax=True)),
    ("ministral3", Family(layer_types.all_alike, scheme=layer_schemes.ministral3, head_dim=128)),
    ("mistral mixtral phimoe starcoder2", Family(layer_types.all_alike)),
    (
        "mistral4",
        Family(
            layer_types.never, scheme=layer_schemes.mistral4, interleaved=True,
            scaled_softmax=True, head_dim=128,
        ),
    ),
    (
        "mistral_large4_text",
        Family(
            layer_types.never, rotates=layer_types.listed, scheme=layer_schemes.mistral_large4,
            interleaved=True, scaled_softmax=True,
        ),
    ),
    ("mpt", Family(plan=whole_plans.mpt)),
    ("mt5 t5 umt5", Family(plan=whole_plans.t5)),
    ("olmo3", Family(layer_types.by_pattern(4), scales_full_layers=True)),
    ("opt", Family(plan=whole_plans.opt)),
    (
        "phi3",
        Family(layer_types.all_alike, yarn_is_longrope=True, defaults={"rope_theta": 10_000.0}),
    ),
    ("qwen2", Family(layer_types.in_later_layers)),
    (
        "qwen2_5_vl_text qwen2_vl qwen2_vl_text",
        Family(layer_types.in_later_layers, sections=(16, 24, 24)),
    ),
    ("qwen2_moe", Family(layer_types.in_early_even_layers)),
    ("qwen3", Family(layer_types.in_later_layers, head_dim=128)),
    ("qwen3_moe", Family(layer_types.all_if_used)),
    ("qwen3_vl_moe_text", Family(layer_types.never, sections=(24, 20, 20), mrope="interleaved")),
    (
        "qwen3_vl_text",
        Family(layer_types.never, sections=(24, 20, 20), mrope="interleaved", head_dim=128),
    ),
    ("smollm3", Family(layer_types.where_not_rotating, rotates=layer_types.listed)),
    ("stablelm", Family(layer_types.never, part=0.25)),
    ("vaultgemma", Family(layer_types.by_pattern(2), head_dim=256)),
)  # fmt: skip
"""Models whose plan is known."""
_READ: tuple[tuple[str, Family], ...] = (
    (
        "afmoe beam cwm dia_decoder dia_encoder flint higgs_audio_v2 hrm_text hy_v3 "
        "iquestcoder jetmoe laguna lfm3 mellum molmo2_text muse_glimmer_assistant "
        "muse_glimmer_text paddleocr_vl_text qwen2_5_omni_talker "
        "qwen3_omni_moe_talker_code_predictor step3p5 zaya",
        Family(head_dim=128),
    ),
    (
        "axk1 axk2 bailing_hybrid deepseek_v32 glm_moe_dsa hy_v4 kimi_k2 longcat_flash",
        Family(interleaved=True, scaled_softmax=True),
    ),
    ("bamba dots3_note_audio_encoder glmasr_encoder recurrent_gemma", Family(part=0.5)),
    (
        "blt blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher "
        "glm_ocr_text moonshine_streaming",
        Family(interleaved=True),
    ),
    ("cosmos3_edge_text", Family(mrope="interleaved", head_dim=128)),
    ("cosmos3_omni qwen3_omni_moe_talker_text qwen3_omni_moe_text", Family(mrope="interleaved")),
    ("deepseek_v4", Family(interleaved=True, head_dim=512)),
    (
        "diffusion_gemma_text embedding_gemma2_text gemma3n_text t5_gemma_module "
        "t5gemma2_decoder t5gemma2_text",
        Family(head_dim=256),
    ),
    ("dots3_note_text", Family(interleaved=True, head_dim=256)),
    ("esm", Family(defaults={"rope_theta": 10_000.0, "position_embedding_type": "absolute"})),
    (
        "gemma4_vision muse_spark_text neomme neucodec voxtral_realtime_encoder xcodec2",
        Family(head_dim=64),
    ),
    ("granitemoehybrid", Family(rotates_if_rope=True)),
    ("hunyuan_vl_text", Family(mrope="hunyuan")),
    ("mimo_v2_flash", Family(head_dim=192)),
    ("minimax_m3_vl_text", Family(head_dim=128, defaults={"rotary_dim": 64})),
    ("modernbert modernbert-decoder", Family(ignores_position_type=True)),
    ("moonshine", Family(interleaved=True, part=0.9)),
    ("musicflamingo", Family(part=0.2)),
    ("nanochat", Family(turns_back=True)),
    ("openai_privacy_filter qwen2_5_omni_dit", Family(interleaved=True, head_dim=64)),
    (
        "pe_audio_encoder pe_audio_video_encoder pe_video_encoder",
        Family(interleaved=True, head_dim=128),
    ),
    ("phi4_multimodal", Family(yarn_is_longrope=True)),
    ("qwen3_5_moe_text qwen3_5_text", Family(mrope="interleaved", head_dim=256, part=0.25)),
    ("qwen3_next", Family(head_dim=256, part=0.25)),
    ("qwen4_exp_text", Family(mrope="interleaved", head_dim=256)),
    ("timesfm2_5", Family(head_dim=80)),
)  # fmt: skip
"""Models whose rotation alone is read."""

FAMILIES = {name: family for names, family in _PLANNED + _READ for name in names.split()}

# Of this architecture under a name of their own, which transformers does not have.
AS_DEEPSEEK_V3 = {"kimi_k2"}
# Released weights pair neighbours, and transformers 5.23 turns by halves:
# WestWaters/pollard-weights#70 (perplexity 151 by halves, 6.39 by neighbours), vllm#54160,
# llama.cpp#28127.
TURNED_BY_HALVES = {"hy_v4"}

_NOTHING_KNOWN = Family()


def family_of(config: Mapping[str, Any]) -> Family:
    """The entry of a configuration, or one that says nothing."""
    return FAMILIES.get(str(config.get("model_type")), _NOTHING_KNOWN)
