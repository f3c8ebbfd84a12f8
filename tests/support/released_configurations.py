"""Configurations as models were released with them.

Each is what the file says about rotation and sizes; lists of LongRoPE are shortened by a rule. They
are in the dialects of their time, so transformers converts most of them.
"""

from __future__ import annotations


def sizes(model, width, heads, length, **rotary):
    return {
        "model_type": model, "hidden_size": width, "num_attention_heads": heads,
        "max_position_embeddings": length, **rotary,
    }  # fmt: skip


def yarn(factor, length, **options):
    return {"factor": factor, "original_max_position_embeddings": length, "type": "yarn", **options}


LONG = {
    "short_factor": [1 + k / 50 for k in range(48)],
    "long_factor": [1.0 + k for k in range(48)],
}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
RELEASED = {
    "Llama 1": sizes("llama", 4096, 32, 2048),
    "Llama 2": sizes("llama", 4096, 32, 4096, rope_scaling=None),
    "Llama 3.1": sizes("llama", 4096, 32, 131072, rope_scaling=LLAMA3, rope_theta=500000.0),
    "Llama 4": {
        "model_type": "llama4",
        "text_config": sizes("llama4_text", 5120, 40, 10485760, head_dim=128, rope_theta=500000.0,
                             rope_scaling={**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}),
    },
    "Vicuna, linear": sizes("llama", 4096, 32, 4096,
                            rope_scaling={"factor": 4.0, "type": "linear"}),
    "Mistral 7B": sizes("mistral", 4096, 32, 32768, rope_theta=1000000.0, sliding_window=None),
    "Qwen2.5 with YaRN": sizes("qwen2", 3584, 28, 32768, rope_theta=1000000.0,
                               rope_scaling=yarn(4.0, 32768)),
    "Qwen2-VL": {
        **sizes("qwen2_vl", 3584, 28, 32768, rope_theta=1000000.0),
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "DeepSeek-V3": sizes(
        "deepseek_v3", 7168, 128, 163840, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rope_theta=10000, rope_scaling=yarn(40, 4096, beta_fast=32, beta_slow=1, mscale=1.0,
                                            mscale_all_dim=1.0)),
    "DeepSeek-V2-Lite": sizes(
        "deepseek_v2", 2048, 16, 163840, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rope_theta=10000, rope_scaling=yarn(40, 4096, beta_fast=32, beta_slow=1, mscale=0.707,
                                            mscale_all_dim=0.707)),
    "Phi-3.5 mini": sizes("phi3", 3072, 32, 131072, original_max_position_embeddings=4096,
                          rope_theta=10000.0, rope_scaling={**LONG, "type": "longrope"}),
    "Phi-2": sizes("phi", 2560, 32, 2048, partial_rotary_factor=0.4, rope_theta=10000.0),
    "Gemma 3 4B": {
        "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34,
                        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024},
    },
    "gpt-oss": sizes(
        "gpt_oss", 2880, 64, 131072, head_dim=64, rope_theta=150000, rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}),
    "GPT-NeoX 20B": sizes("gpt_neox", 6144, 64, 2048, rotary_emb_base=10000, rotary_pct=0.25),
    "Pythia": sizes("gpt_neox", 512, 8, 2048, rotary_emb_base=10000, rotary_pct=0.25),
    "StableLM": sizes("stablelm", 2560, 32, 4096, partial_rotary_factor=0.25, rope_theta=10000),
    "GLM-4": sizes("glm", 4096, 32, 131072, head_dim=128, partial_rotary_factor=0.5,
                   rope_theta=10000.0),
    "Cohere 2": sizes("cohere2", 4096, 32, 8192, head_dim=128, rope_theta=50000, rotary_pct=1.0,
                      position_embedding_type="rope_gptj", sliding_window=4096),
    "OLMo 3": sizes(
        "olmo3", 4096, 32, 65536, rope_theta=500000, rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
            "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"}),
    "ModernBERT": sizes("modernbert", 768, 12, 8192, global_rope_theta=160000.0,
                        local_rope_theta=10000.0, position_embedding_type="absolute"),
    "SmolLM3": sizes("smollm3", 2048, 16, 65536, rope_theta=5000000.0, rope_scaling=None),
    "MiniMax-M2": sizes("minimax_m2", 3072, 48, 196608, head_dim=128, rotary_dim=64,
                        rope_theta=5000000),
    "Hunyuan": sizes(
        "hunyuan_v1_dense", 4096, 32, 32768, head_dim=128, rope_theta=10000.0, rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
            "mscale_all_dim": 0.0, "type": "dynamic"}),
    "Falcon": {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
               "alibi": False},
    "ESM-2": sizes("esm", 480, 20, 1026, position_embedding_type="rotary", vocab_size=33),
}  # fmt: skip
# Odd in one way or another; each says whose configuration it is, or where its keys were read.
AXES = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 10000000}
QWEN36 = {
    **sizes("qwen3_5_moe_text", 2048, 16, 262144, head_dim=256), "full_attention_interval": 4,
    "layer_types": [*3 * ["linear_attention"], "full_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}  # fmt: skip
ODD = {
    # The model card of Qwen3.6 on the key rope_parameters: YaRN, axes and a quarter of a head.
    "Qwen3.6 with YaRN": {"model_type": "qwen3_5_moe", "text_config": {
        **QWEN36, "rope_parameters": {
            **AXES, "factor": 4.0, "original_max_position_embeddings": 262144,
            "partial_rotary_factor": 0.25, "rope_type": "yarn"}}},
    # The same model in a file whose partial factor stands outside of rope_parameters.
    "Qwen3.5, factor outside": {"model_type": "qwen3_5_moe", "text_config": {
        **QWEN36, "partial_rotary_factor": 0.25,
        "rope_parameters": {**AXES, "rope_type": "default"}}},
    # XiaomiMiMo/MiMo-V2-Flash: two bases in keys of its own, a window of 128 and the token itself.
    "MiMo-V2-Flash": sizes(
        "mimo_v2_flash", 4096, 64, 262144, head_dim=192, hybrid_layer_pattern=[0, 1],
        num_hidden_layers=2, partial_rotary_factor=0.334, rope_theta=5000000, sliding_window=128,
        sliding_window_size=128, swa_head_dim=192, swa_rope_theta=10000, v_head_dim=128,
        swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_v_head_dim=128,
        moe_layer_freq=[0, 1],
        add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False),
    # LGAI-EXAONE/EXAONE-4.0-32B, as NVIDIA/TensorRT-LLM's tests have it.
    "EXAONE 4.0 32B": sizes(
        "exaone4", 5120, 40, 131072, head_dim=128, rope_scaling={**LLAMA3, "factor": 16.0},
        rope_theta=1000000, sliding_window=4096, sliding_window_pattern="LLLG",
        layer_types=[*3 * ["sliding_attention"], "full_attention"]),
    # LGAI-EXAONE/EXAONE-4.0-1.2B: no window, so every layer rotates.
    "EXAONE 4.0 1.2B": sizes(
        "exaone4", 2048, 32, 65536, rope_scaling={**LLAMA3, "factor": 16.0}, rope_theta=1000000,
        sliding_window=None, sliding_window_pattern=None, num_hidden_layers=4, head_dim=64,
        layer_types=4 * ["full_attention"]),
    # tiiuae/Falcon-H1-Tiny-90M: a base of 10**11.
    "Falcon-H1 Tiny": sizes("falcon_h1", 512, 8, 16384, head_dim=64, rope_scaling=None,
                            rope_theta=100000000000.0),
    # mistralai/Ministral-3-8B-Base-2512: YaRN, and queries that grow with position.
    "Ministral 3 8B": sizes(
        "ministral3", 4096, 32, 262144, head_dim=128, rope_parameters={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0, "rope_type": "yarn"}, sliding_window=None),
    # microsoft/Phi-4-mini-instruct: LongRoPE on three quarters of a head.
    "Phi-4 mini": sizes("phi3", 3072, 24, 131072, original_max_position_embeddings=4096,
                        partial_rotary_factor=0.75, rope_theta=10000.0,
                        rope_scaling={**LONG, "type": "longrope"}),
    # swiss-ai/Apertus-8B-Instruct-2509.
    "Apertus 8B": sizes("apertus", 4096, 32, 65536, rope_parameters={
        **LLAMA3, "low_freq_factor": 1.0, "rope_theta": 12000000.0}),
    # moonshotai/Kimi-Linear-48B-A3B-Instruct: a rotary part of 64 channels that never rotates.
    "Kimi Linear": sizes("kimi_linear", 2304, 32, 1048576, mla_use_nope=True, qk_nope_head_dim=128,
                         qk_rope_head_dim=64, rope_theta=10000.0, head_dim=72, kv_lora_rank=512,
                         linear_attn_config={"full_attn_layers": [4], "kda_layers": [1, 2, 3],
                                             "head_dim": 128, "num_heads": 32,
                                             "short_conv_kernel_size": 4}),
}  # fmt: skip
REST = {
    "attention_bias": False, "intermediate_size": 8, "intermediate_size_mlp": 8,
    "interleave_moe_layer_step": 1, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5, "mlp_bias": False, "model_max_length": 1048576,
    "moe_intermediate_size": 8, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 2,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts": 2, "num_experts_per_tok": 1,
    "num_hidden_layers": 4, "num_local_experts": 2, "post_norm": True, "qk_norm": True,
    "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
    "shared_expert_intermediate_size": 8, "shared_intermediate_size": 8,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_qk_norm": False,
    "use_qkv_bias": False, "vocab_size": 262144,
}  # fmt: skip
"""Keys that say nothing about positions, which a library may ask."""


def whole(config):
    """A configuration with sizes that say nothing about positions, which readers ask."""
    part = config.get("text_config")
    heads = (part or config).get("num_attention_heads", 8)
    given = {**REST, "num_key_value_heads": heads, **config}
    return {**given, "text_config": whole(part)} if part else given
