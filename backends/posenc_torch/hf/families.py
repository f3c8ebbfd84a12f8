"""The families that ``apply`` knows, by the ``model_type`` of their configuration of text."""

from __future__ import annotations

from posenc_torch.hf.axes import AXES
from posenc_torch.hf.embeddings import EMBEDDINGS
from posenc_torch.hf.family import Family
from posenc_torch.hf.inkling import INKLING
from posenc_torch.hf.latent import LATENT
from posenc_torch.hf.own_attention import OWN_ATTENTION
from posenc_torch.hf.sparse import SPARSE
from posenc_torch.hf.t5 import T5

_AS_LLAMA = (
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe",
    "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe", "helium",
    "internlm3", "jais2", "kolibri1", "llama", "minimax_m2", "mistral", "mixtral", "nemotron",
    "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
    "vaultgemma",
)  # fmt: skip

FAMILIES = {
    **AXES,
    **EMBEDDINGS,
    **INKLING,
    **LATENT,
    **OWN_ATTENTION,
    **SPARSE,
    **T5,
    **{kind: Family() for kind in _AS_LLAMA},
    "gpt_neox": Family(attention="attention"),
    # Its attention multiplies queries by the logarithm of their position, as the plan does.
    "llama4_text": Family(off={"attn_temperature_tuning": False}),
    "ministral3": Family(hides_positions=True),  # likewise
}

REFUSED = dict.fromkeys(
    ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"),
    "it norms queries and keys after their rotation, and learned factors do not commute with one",
)
"""Models that cannot be served, and why."""
