"""``posenc_torch.hf.apply``: families that do not fit the plain path of rotary models."""

from __future__ import annotations

import pytest
from sample import long, some

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

import hf_models  # noqa: E402

# name -> configuration and its options
CASES = {
    "bloom": ("Bloom", {}),
    "falcon": ("Falcon", {"alibi": False, "multi_query": True}),
    "falcon-new": (
        "Falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    # In eager mode transformers adds ALiBi to Falcon's scores twice: see docs/hf.md.
    "falcon_rw": (
        "Falcon",
        {
            "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
            "attn_implementation": "sdpa",
        },
    ),
    "gptj": ("GPTJ", {"rotary_dim": 4}),
    "mpt": ("Mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
}  # fmt: skip
QUICK = ("bloom", "gptj")


@pytest.mark.parametrize("check", hf_models.CHECKS)
@pytest.mark.parametrize("name", some(CASES, QUICK, long))
def test_a_model_keeps_its_logits(name, check):
    kind, options = CASES[name]
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    check(*hf_models.pair(kind, **options))
