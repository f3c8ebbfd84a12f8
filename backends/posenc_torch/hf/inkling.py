"""Inkling 1 and 2: a bias that each query chooses, from weights of the attention module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from posenc_torch.hf.family import Family
from posenc_torch.hf.layer import LAYER, layer_of


def _params(attention: Any) -> Mapping[str, Tensor]:
    """In a ``Sum`` with the log-position scaling, the bias comes first."""
    p = attention.rel_logits_proj.proj
    w = attention.r_proj.weight.view(-1, len(p), attention.r_proj.in_features)
    prefix = "0_" if "0_w" in layer_of(attention).scheme.param_specs() else ""
    if not hasattr(attention, "sink_proj"):
        return {f"{prefix}w": w, f"{prefix}p": p}
    w = w * attention.rel_l2_clip.scale[..., None]
    return {f"{prefix}w": w, f"{prefix}p": p, "sink_w": attention.sink_proj.weight}


def _prepare(model: nn.Module, applied: Any) -> None:
    """Switch off the model's own bias, and in Inkling 1 the log-position scaling."""
    for module in list(model.modules()):
        if not hasattr(module, LAYER):
            continue
        applied.replace(module.rel_logits_proj, "forward", _no_bias)
        if not hasattr(module, "sink_proj"):
            config: Any = copy.copy(module.config)
            config.log_scaling_n_floor = None
            applied.replace(module, "config", config)


def _no_bias(*given: Any) -> None:
    return None


INKLING = {
    # Its log-position scaling is 1 at the position 0.
    "inkling2_text": Family(rotary=None, hides_positions=True, params=_params, prepare=_prepare),
    "inkling_text": Family(rotary=None, params=_params, prepare=_prepare),
}
"""The families of this file, by ``model_type``."""
