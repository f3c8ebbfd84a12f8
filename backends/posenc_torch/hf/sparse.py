"""Mistral Large 4: latent attention to the keys that an indexer chooses.

The indexer has queries and keys of its own and rotates them by the model's angles. That, and the
choice, stays the model's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posenc_torch.hf.family import Family
from posenc_torch.hf.latent import plan_of_halves, rotating_first
from posenc_torch.hf.layer import LAYER

_ROTARY, _ANGLES = "_posenc_rotary", "_posenc_angles"


def _params(attention: Any) -> Mapping[str, Tensor]:
    scaling = attention.softmax_scaling
    if not attention.use_rope:
        return {"a": scaling.scale, "b": scaling.bias}
    (rotary,) = getattr(attention, _ROTARY)
    return {"0_log_scale": rotary.alpha, "1_a": scaling.scale, "1_b": scaling.bias}


def _prepare(model: nn.Module, applied: Any) -> None:
    modules: list[Any] = list(model.modules())
    rotary = next(module.rotary_emb for module in modules if hasattr(module, "rotary_emb"))
    for module in modules:
        if not hasattr(module, LAYER):
            continue
        applied.replace(module, _ROTARY, (rotary,))  # in a tuple, so that it is no child
        applied.replace(module, _ANGLES, None)
        applied.replace(module.softmax_scaling, "forward", _as_they_are)
        applied.before(module, _without_angles)
        if module.indexer is not None:
            applied.before(module.indexer, functools.partial(_with_angles, module))


def _as_they_are(queries: Tensor, *given: Any, **options: Any) -> Tensor:
    return queries


def _without_angles(attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before attention: no rotation."""
    cos, sin = kwargs["position_embeddings"]
    setattr(attention, _ANGLES, (cos, sin))
    none = (torch.ones_like(cos), torch.zeros_like(sin))
    return args, {**kwargs, "position_embeddings": none}


def _with_angles(attention: Any, indexer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before the indexer: the model's rotation."""
    hidden, _, *others = args
    return (hidden, getattr(attention, _ANGLES), *others), kwargs


SPARSE = {
    "mistral_large4_text": Family(
        rotary=None, plan=plan_of_halves, params=_params, channels=rotating_first, prepare=_prepare
    )
}
"""The families of this file, by ``model_type``."""
