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
# name -> configuration and its options
CASES = {
    "cohere2": ("Cohere2", {**WINDOW, "num_hidden_layers": 4}),
    "exaone4": ("Exaone4", {**WINDOW, "num_hidden_layers": 4}),
    "gemma2": ("Gemma2", {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 9}),
    "gemma3": ("Gemma3Text", {**WINDOW, "head_dim": 16, "num_hidden_layers": 6}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_oss": ("GptOss", {**WINDOW, **EXPERTS, "head_dim": 16, "rope_parameters": YARN}),
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "ministral3": (
        "Ministral3",
        {**WINDOW, "head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    ),
    "mistral": ("Mistral", WINDOW),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {**WINDOW, "num_hidden_layers": 4, "rope_parameters": YARN}),
    "phi3": ("Phi3", WINDOW),
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
