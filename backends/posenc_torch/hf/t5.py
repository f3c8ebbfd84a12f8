"""T5: an encoder and a decoder with one learned table each, in their first layer.

In UMT5 every layer has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posenc.backend import LayerPlan
from posenc.presets import from_hf_config
from posenc_torch.hf.family import Family


def _stack(config: Any) -> LayerPlan:
    """The plan of the encoder or the decoder; its configuration is that of the whole model."""
    given = config.to_dict() if hasattr(config, "to_dict") else config
    return from_hf_config({**given, "is_encoder_decoder": False})


def _table(attention: Any) -> Mapping[str, Tensor]:
    return {"table": attention.relative_attention_bias.weight.T}


def _no_bias(*given: Any, **options: Any) -> Tensor:
    """What the model passes from layer to layer instead of its bias ``(1, H, Q, K)``."""
    return torch.zeros(())


_T5 = Family(
    attention="SelfAttention",
    cross="EncDecAttention",
    rotary=None,
    off={"compute_bias": _no_bias},
    plan=_stack,
    params=_table,
)
T5 = {"mt5": _T5, "t5": _T5, "umt5": _T5}
"""The families of this file, by ``model_type``."""
