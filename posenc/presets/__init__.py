"""Layer plans of published models: which scheme and which window each layer has.

A plan is a function of sizes, by keyword; its defaults are those of the released configuration.
``posenc_torch.Positions(plan)`` and ``posenc_jax.Positions.init(plan, key=key)`` make a model of
it. ``PLANS`` maps names to these functions.

>>> plan = smollm3(layers=4, head_dim=64)
>>> [type(scheme).__name__ for scheme in plan.schemes]
['RoPE', 'RoPE', 'RoPE', 'NoPE']
"""

from posenc.layers import LayerPlan
from posenc.presets.hf import from_hf_config
from posenc.presets.named import PLANS
from posenc.presets.plans import (
    cohere2,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
    irope,
    kolibri1,
    llama4,
    mistral_large4,
    olmo3,
    rnope,
    smollm3,
    swan,
)

__all__ = [
    "PLANS", "LayerPlan", "cohere2", "exaone4", "from_hf_config", "gemma2", "gemma3", "gemma4",
    "gpt_oss", "irope", "kolibri1", "llama4", "mistral_large4", "olmo3", "rnope", "smollm3", "swan",
]  # fmt: skip
