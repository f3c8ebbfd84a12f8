"""What ``apply`` has to know about a family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from posenc.backend import LayerPlan
from posenc.presets import from_hf_config


def _no_params(module: nn.Module) -> Mapping[str, Tensor]:
    return {}


def _nothing_more(model: nn.Module, applied: Any) -> None:
    return None


def _as_they_are(position_ids: Tensor) -> Tensor:
    return position_ids


def _in_order(module: nn.Module, x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Family:
    """Where a family of models keeps what ``apply`` replaces.

    Attributes
    ----------
    attention
        Name, in a layer, of the module that attends.
    cross
        Name, in a layer, of the module that attends to tokens of an encoder, which has no
        positions. None: the family has none.
    rotary
        Name of the modules that make angles; ``apply`` makes them return no rotation. None: the
        family has none.
    hides_positions
        Whether attention modules get ``position_ids`` of 0, so that what they compute from them is
        switched off.
    off
        Attributes of attention modules and their values, which switch something off.
    plan
        The plan of a configuration.
    params
        Learned arrays of the plan's schemes among the weights of an attention module. A sink that
        the model passes to its attention function is taken without it.
    places
        What the scheme encodes, ``(B or 1, L)`` or ``(B or 1, L, axes)``, from ``position_ids``.
    rotary_positions
        Whether they are the ``position_ids`` that the rotary module gets, even if layers get some.
    table_positions
        Whether they are those that its table gets, because layers get none.
    channels
        Queries or keys ``(B, H, L, D)`` of an attention module, their channels in the order of the
        plan's schemes.
    own_attention
        Whether attention is code of the model, which calls no function that a configuration names.
    always_causal
        Whether the causal mask and windows hold beside a whole mask that the caller gives.
    prepare
        Does whatever else is needed, from the model and the ``Applied`` whose ``replace`` and
        ``undo`` make it reversible.
    """

    attention: str = "self_attn"
    cross: str | None = None
    rotary: str | None = "rotary_emb"
    hides_positions: bool = False
    off: Mapping[str, Any] = field(default_factory=dict)
    plan: Callable[[Any], LayerPlan] = from_hf_config
    params: Callable[[nn.Module], Mapping[str, Tensor]] = _no_params
    places: Callable[[Tensor], Tensor] = _as_they_are
    rotary_positions: bool = False
    table_positions: bool = False
    channels: Callable[[nn.Module, Tensor], Tensor] = _in_order
    own_attention: bool = False
    always_causal: bool = False
    prepare: Callable[[nn.Module, Any], None] = _nothing_more
