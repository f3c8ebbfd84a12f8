"""What a ``model_type`` says by its name alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from posenc.contract.protocol import PositionScheme
from posenc.hf.layer_schemes import plain
from posenc.hf.layer_types import ALIKE, Config, LayerType, always
from posenc.layers import LayerPlan
from posenc.schemes.mrope import Order
from posenc.schemes.rope import RoPE


@dataclass(frozen=True)
class Family:
    """What transformers 5.23 and released weights make of a configuration of one ``model_type``.

    Of the layers, for a plan:

    Attributes
    ----------
    layer_type
        The type of a layer, where ``layer_types`` is missing; None, and no ``plan``: no plan of
        these models is known here.
    rotates
        Whether a layer rotates, from its index and whether it has a window.
    scheme
        The scheme of a layer, from its RoPE, or None if it does not rotate.
    plan
        The whole plan, of models that do not rotate; it returns None for one that does.

    Of the rotation:

    interleaved
        Whether pairs of channels are neighbours, as in the released weights.
    sections
        The sections of M-RoPE where a configuration has none; None: positions have one axis.
    mrope
        Which axis each pair of M-RoPE belongs to, whatever other keys a configuration has; None: by
        its keys.
    turns_back
        Whether angles are negative.
    scaled_softmax
        Whether the softmax scale is multiplied by ``m(s, mscale_all_dim)**2`` under YaRN.
    rotates_if_rope
        Whether it rotates only if ``position_embedding_type`` is ``rope``.
    ignores_position_type
        Whether it rotates though ``position_embedding_type`` may be ``absolute``, as in BERT.
    scales_full_layers
        Whether a flat ``rope_scaling`` serves full attention alone, with one base for all layers.
    yarn_is_longrope
        Whether older configurations call LongRoPE ``yarn``.
    head_dim
        Channels per head where a configuration does not have ``head_dim``, whatever its width;
        None: they follow from the width and the heads.
    part
        The part of the channels that rotates, where a configuration does not say it.
    defaults
        Other keys that released configurations leave out, with the defaults of transformers.
    """

    layer_type: LayerType | None = None
    rotates: Callable[[Config, int, bool], bool] = always
    scheme: Callable[[Config, RoPE | None], PositionScheme] = plain
    plan: Callable[[Config], LayerPlan | None] | None = None
    interleaved: bool = False
    sections: tuple[int, int, int] | None = None
    mrope: Order | None = None
    turns_back: bool = False
    scaled_softmax: bool = False
    rotates_if_rope: bool = False
    ignores_position_type: bool = False
    scales_full_layers: bool = False
    yarn_is_longrope: bool = False
    head_dim: int | None = None
    part: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def planned(self) -> bool:
        """Whether the plan of a configuration is known."""
        return self.plan is not None or self.layer_type is not None

    @property
    def reads_layer_types(self) -> bool:
        """Whether the class of transformers reads ``layer_types``; else all layers are alike."""
        return self.layer_type not in ALIKE
