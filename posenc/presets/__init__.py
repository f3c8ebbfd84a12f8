"""Layer plans of published models: which scheme and which window each layer has.

A plan is a function of sizes, by keyword; its defaults are those of the released configuration.
``posenc_torch.Positions(plan)`` and ``posenc_jax.Positions.init(plan, key=key)`` make a model of
it. ``PLANS`` maps names to these functions. Where all layers of a model are alike, as those of
``llama`` or ``bloom``, the function gives their scheme.

>>> plan = smollm3(layers=4, head_dim=64)
>>> [type(scheme).__name__ for scheme in plan.schemes]
['RoPE', 'RoPE', 'RoPE', 'NoPE']
"""

from posenc.hf import from_hf_config
from posenc.layers import LayerPlan
from posenc.presets.named import PLANS
from posenc.presets.plans import (
    cohere2,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
    inkling,
    inkling2,
    irope,
    kolibri1,
    llama4,
    mistral_large4,
    olmo3,
    rnope,
    smollm3,
    swan,
)
from posenc.presets.uniform import (
    bloom,
    deepseek_v3,
    falcon_rw,
    gpt2,
    gptj,
    llama,
    llama3,
    mpt,
    neox,
    opt,
    phi3,
    qwen2_vl,
    qwen3_vl,
    t5,
)

__all__ = [
    "PLANS", "LayerPlan", "bloom", "cohere2", "deepseek_v3", "exaone4", "falcon_rw",
    "from_hf_config", "gemma2", "gemma3", "gemma4", "gpt2", "gpt_oss", "gptj", "inkling",
    "inkling2", "irope", "kolibri1", "llama", "llama3", "llama4", "mistral_large4", "mpt", "neox",
    "olmo3", "opt", "phi3", "qwen2_vl", "qwen3_vl", "rnope", "smollm3", "swan", "t5",
]  # fmt: skip
