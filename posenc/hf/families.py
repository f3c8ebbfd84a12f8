"""What a configuration says by its ``model_type`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEEPSEEK_V3 = {"kimi_k2"}
"""Models of this architecture under a name of their own, which transformers does not have."""

RELEASED_INTERLEAVED = {
    # WestWaters/pollard-weights#70: perplexity 151 by halves, 6.39 by neighbours; vllm#54160;
    # llama.cpp#28127.
    "hy_v4",
}
"""Models whose released weights pair neighbours, and which transformers 5.23 turns by halves."""

INTERLEAVED = {
    "axk1", "axk2", "bailing_hybrid", "blt", "blt_global_transformer", "blt_local_decoder",
    "blt_local_encoder", "blt_patcher", "codegen", "cohere", "cohere2", "cohere2_moe",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots3_note_text", "ernie4_5",
    "ernie4_5_moe", "ernie4_5_vl_moe_text", "glm", "glm4", "glm4_moe_lite", "glm4v_text",
    "glm_moe_dsa", "glm_ocr_text", "gptj", "helium", "llama4_text", "longcat_flash", "mistral4",
    "mistral_large4_text", "moonshine", "moonshine_streaming", "openai_privacy_filter",
    "pe_audio_encoder", "pe_audio_video_encoder", "pe_video_encoder", "qwen2_5_omni_dit", "youtu",
    *DEEPSEEK_V3, *RELEASED_INTERLEAVED,
}  # fmt: skip
"""Models whose pairs of channels are neighbours, as their released weights are."""

MROPE_INTERLEAVED = {
    "cosmos3_edge_text", "cosmos3_omni", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_omni_moe_talker_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text",
    "qwen4_exp_text",
}  # fmt: skip
MROPE_LAYOUTS = {
    **dict.fromkeys(MROPE_INTERLEAVED, "interleaved"),
    "ernie4_5_vl_moe_text": "ernie",
    "hunyuan_vl_text": "hunyuan",
}
"""Models with M-RoPE that is not chunked, whatever other keys their configurations have."""

REVERSED = {"nanochat"}
"""Models that rotate by the negative angle."""

SCALED_SOFTMAX = {
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
    "glm_moe_dsa", "hy_v4", "longcat_flash", "minicpm3", "mistral4", "mistral_large4_text", "youtu",
    *DEEPSEEK_V3,
}  # fmt: skip
"""Models that multiply the softmax scale by ``m(s, mscale_all_dim)**2`` under YaRN."""

ROTATING_IF_ROPE = {"granitemoehybrid"}
"""Models that rotate only if ``position_embedding_type`` is ``rope``."""

POSITION_TYPE_UNREAD = {"modernbert", "modernbert-decoder"}
"""Models that rotate, though their ``position_embedding_type`` may be ``absolute`` as in BERT."""

FULL_LAYERS_ONLY = {"olmo3"}
"""Models whose flat ``rope_scaling`` serves full attention alone, with one base for all layers."""

SHORT_AND_LONG = {"phi3", "phi4_multimodal"}
"""Models whose older configurations call LongRoPE ``yarn``."""

HEAD_DIMS: Mapping[str, int] = {
    **dict.fromkeys((
        "gemma4_vision", "gpt_oss", "muse_spark_text", "neomme", "neucodec",
        "openai_privacy_filter", "qwen2_5_omni_dit", "voxtral_realtime_encoder", "xcodec2",
    ), 64),
    "timesfm2_5": 80,
    **dict.fromkeys((
        "afmoe", "beam", "cohere2_moe", "cosmos3_edge_text", "cwm", "dia_decoder",
        "dia_encoder", "ernie4_5", "flint", "glm", "glm4", "helium", "higgs_audio_v2",
        "hrm_text", "hy_v3", "internlm3", "iquestcoder", "jetmoe", "kolibri1", "laguna", "lfm3",
        "llama4_text", "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral3",
        "mistral4", "molmo2_text", "muse_glimmer_assistant", "muse_glimmer_text",
        "paddleocr_vl_text", "pe_audio_encoder", "pe_audio_video_encoder", "pe_video_encoder",
        "qwen2_5_omni_talker", "qwen3", "qwen3_omni_moe_talker_code_predictor",
        "qwen3_vl_text", "seed_oss", "solar_open", "step3p5", "zaya",
    ), 128),
    "mimo_v2_flash": 192,
    **dict.fromkeys((
        "diffusion_gemma_text", "dots3_note_text", "embedding_gemma2_text", "gemma", "gemma2",
        "gemma3_text",
        "gemma3n_text", "gemma4_text", "gemma4_unified_text", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "t5_gemma_module",
        "t5gemma2_decoder", "t5gemma2_text", "vaultgemma",
    ), 256),
    "deepseek_v4": 512,
}  # fmt: skip
"""Channels per head where a configuration does not have ``head_dim``, whatever its width; by the
classes of transformers 5.23. For all others they follow from the width and the heads."""

PARTS: Mapping[str, float] = {
    "musicflamingo": 0.2,
    **dict.fromkeys((
        "gpt_neox", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm",
    ), 0.25),
    **dict.fromkeys((
        "bamba", "dots3_note_audio_encoder", "glm", "glm4", "glm4_moe", "glm4v_moe_text",
        "glmasr_encoder", "nemotron", "persimmon", "phi", "recurrent_gemma",
    ), 0.5),
    "moonshine": 0.9,
}  # fmt: skip
"""The part of the channels that rotates, where a configuration does not say it; likewise."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "codegen": {"rope_theta": 10_000.0, "rotary_dim": 64},
    "esm": {"rope_theta": 10_000.0, "position_embedding_type": "absolute"},
    "falcon": {"rope_theta": 10_000.0, "max_position_embeddings": 2048},
    "gemma": {"rope_theta": 10_000.0},
    "gemma2": {"rope_theta": 10_000.0},
    "gemma3_text": {
        "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
        "max_position_embeddings": 131_072,
    },
    "gpt_neox": {"rotary_emb_base": 10_000.0},
    "gptj": {"rope_theta": 10_000.0, "rotary_dim": 64},
    "llama": {"rope_theta": 10_000.0, "max_position_embeddings": 2048},
    "minimax_m3_vl_text": {"rotary_dim": 64},
    "phi3": {"rope_theta": 10_000.0},
}  # fmt: skip
"""What released configurations leave out, from the defaults of transformers' classes."""
