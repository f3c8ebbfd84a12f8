"""The families that ``apply`` knows, by the ``model_type`` of their configuration of text."""

from __future__ import annotations

from posenc_torch.hf.axes import AXES
from posenc_torch.hf.embeddings import EMBEDDINGS
from posenc_torch.hf.family import Family
from posenc_torch.hf.inkling import INKLING
from posenc_torch.hf.latent import LATENT
from posenc_torch.hf.own_attention import OWN_ATTENTION
from posenc_torch.hf.t5 import T5

FAMILIES = {
    **AXES,
    **EMBEDDINGS,
    **INKLING,
    **LATENT,
    **OWN_ATTENTION,
    **T5,
    "cohere2": Family(),
    "exaone4": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(),
    "gemma4_text": Family(),
    "gemma4_unified_text": Family(),
    "gpt_neox": Family(attention="attention"),
    "gpt_oss": Family(),
    "kolibri1": Family(),
    "llama": Family(),
    # Its attention multiplies queries by the logarithm of their position, as the plan does.
    "llama4_text": Family(off={"attn_temperature_tuning": False}),
    "ministral3": Family(hides_positions=True),  # likewise
    "mistral": Family(),
    "olmo2": Family(),
    "olmo3": Family(),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "smollm3": Family(),
}
