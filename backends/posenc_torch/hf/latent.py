"""Latent attention: DeepSeek and models like it; channels that rotate come behind the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posenc.backend import LayerPlan
from posenc.presets import from_hf_config
from posenc.schemes import Sum
from posenc_torch.hf.family import Family


def plan_of_halves(config: Any) -> LayerPlan:
    """The plan, with pairs of channels that are halves.

    Models that pair neighbours reorder them where they rotate, also by an angle of 0.
    """

    def scheme(given: Any) -> Any:
        if isinstance(given, Sum):
            return Sum(*map(scheme, given.schemes))
        return replace(given, layout="half") if hasattr(given, "layout") else given

    plan = from_hf_config(config)
    return LayerPlan(tuple(map(scheme, plan.schemes)), plan.windows)


def rotating_first(module: Any, x: Tensor) -> Tensor:
    """Queries or keys, with the channels that rotate before the others."""
    fixed = module.qk_nope_head_dim
    return torch.cat((x[..., fixed:], x[..., :fixed]), dim=-1)


_HALVES = Family(plan=plan_of_halves, channels=rotating_first)
LATENT = {
    "deepseek_v2": Family(channels=rotating_first),
    "deepseek_v3": _HALVES,
    "glm4_moe_lite": _HALVES,
    "minicpm3": _HALVES,
    # It multiplies queries by the logarithm of their position, as the plan does.
    "mistral4": Family(plan=plan_of_halves, channels=rotating_first, hides_positions=True),
    "youtu": _HALVES,
}
"""The families of this file, by ``model_type``."""
