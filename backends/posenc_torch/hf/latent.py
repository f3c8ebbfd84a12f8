"""DeepSeek V3: latent attention, whose heads have channels that rotate behind those that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posenc.backend import LayerPlan
from posenc.presets import from_hf_config
from posenc_torch.hf.family import Family


def _plan(config: Any) -> LayerPlan:
    """The pairs of channels are halves: the model reorders neighbours before it rotates."""
    plan = from_hf_config(config)
    ropes: Any = plan.schemes
    return LayerPlan(tuple(replace(rope, layout="half") for rope in ropes), plan.windows)


def rotating_first(module: Any, x: Tensor) -> Tensor:
    """Queries or keys, with the channels that rotate before the others."""
    fixed = module.qk_nope_head_dim
    return torch.cat((x[..., fixed:], x[..., :fixed]), dim=-1)


LATENT = {"deepseek_v3": Family(plan=_plan, channels=rotating_first)}
"""The families of this file, by ``model_type``."""
