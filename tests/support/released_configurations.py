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
