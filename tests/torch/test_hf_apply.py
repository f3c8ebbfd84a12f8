"""``posenc_torch.hf.apply``: tiny random models of transformers keep their logits."""

from __future__ import annotations

import pytest
from sample import long, some

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

import hf_models  # noqa: E402

WINDOW = {"sliding_window": 5}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 16,
}  # fmt: skip
GEMMA4 = {
    **WINDOW, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 2,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
PER_TYPE = {"full_attention": YARN, "sliding_attention": PLAIN}
# name -> configuration and its options
CASES = {
    "cohere2": ("Cohere2", {**WINDOW, "num_hidden_layers": 4}),
    "exaone4": ("Exaone4", {**WINDOW, "num_hidden_layers": 4}),
    "gemma2": ("Gemma2", {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 9}),
    "gemma3": ("Gemma3Text", {**WINDOW, "head_dim": 16, "num_hidden_layers": 6}),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4-shared-keys": (
        "Gemma4Text",
        {
            **GEMMA4, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 31,
        },
    ),
    "gemma4_unified": ("Gemma4UnifiedText", GEMMA4),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_oss": ("GptOss", {**WINDOW, **EXPERTS, "head_dim": 16, "rope_parameters": YARN}),
    "kolibri1": (
        "Kolibri1",
        {**WINDOW, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1,
         "num_hidden_layers": 5},
    ),
    "llama": ("Llama", {}),
    "llama-dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": 8,
        },
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama4": (
        "Llama4Text",
        {
            "attention_chunk_size": 5, "head_dim": 16, "floor_scale": 3, "attn_scale": 0.5, "num_hidden_layers": 4,
            "moe_layers": [], "intermediate_size_mlp": 32, "num_local_experts": 2,
        },
    ),
    "ministral3": (
        "Ministral3",
        {**WINDOW, "head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    ),
    "mistral": ("Mistral", WINDOW),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {**WINDOW, "num_hidden_layers": 4, "rope_parameters": PER_TYPE}),
    "phi3": ("Phi3", WINDOW),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "qwen2": ("Qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
}
QUICK = ("gemma3", "gpt_oss", "llama")


@pytest.mark.parametrize("check", hf_models.CHECKS)
@pytest.mark.parametrize("name", some(CASES, QUICK, long))
def test_a_model_keeps_its_logits(name, check):
    kind, options = CASES[name]
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    check(*hf_models.pair(kind, **options))
