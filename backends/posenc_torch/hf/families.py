"""The families that ``apply`` knows, by the ``model_type`` of their configuration of text.

They are those with a plan. Here is only where modules of a model are unlike those of Llama.
"""

from __future__ import annotations

from posenc import hf
from posenc_torch.hf.axes import AXES
from posenc_torch.hf.embeddings import EMBEDDINGS
from posenc_torch.hf.family import Family
from posenc_torch.hf.inkling import INKLING
from posenc_torch.hf.latent import LATENT
from posenc_torch.hf.own_attention import OWN_ATTENTION
from posenc_torch.hf.sparse import SPARSE
from posenc_torch.hf.t5 import T5

FAMILIES = {
    **{kind: Family() for kind, known in hf.FAMILIES.items() if known.planned},
    **AXES,
    **EMBEDDINGS,
    **INKLING,
    **LATENT,
    **OWN_ATTENTION,
    **SPARSE,
    **T5,
    "gpt_neox": Family(attention="attention"),
    # Its attention multiplies queries by the logarithm of their position, as the plan does.
    "llama4_text": Family(off={"attn_temperature_tuning": False}),
    "ministral3": Family(hides_positions=True),  # likewise
}

REFUSED = {
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"),
        "it norms queries and keys after their rotation, and learned factors do not commute with "
        "one",
    ),
    # Whether to equal the model or its weights would be a guess: see posenc.audit.released.
    "hy_v4": "transformers turns halves, and its released weights pair neighbours "
    "(vllm-project/vllm#54160), so no result would equal both",
}
"""Models that cannot be served, and why."""
