"""GPT-2 and OPT: a learned vector per position, added to the embeddings of tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import array_api_compat.torch as xp
from torch import Tensor, nn

import posenc
from posenc_torch.hf.family import Family
from posenc_torch.hf.layer import LAYER, Layer


@dataclass(frozen=True)
class PositionTable:
    """The module ``name`` of a model, whose weights are the table of ``Learned``.

    Its ``forward`` is replaced: by the embedding of the model's plan with the same weights, or by 0
    if the caller gave another scheme.
    """

    name: str

    def prepare(self, model: nn.Module, applied: Any) -> None:
        """As ``Family.prepare``."""
        modules = list(model.modules())
        layer = next(getattr(module, LAYER) for module in modules if hasattr(module, LAYER))
        for module in modules:
            table = getattr(module, self.name, None)
            if isinstance(table, nn.Module):
                applied.replace(table, "forward", functools.partial(_embed, module, table, layer))


def _embed(
    model: Any, table: Any, layer: Layer, *given: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """GPT-2 gives positions first, OPT by name."""
    ids = given[0] if position_ids is None else position_ids
    if layer.own_params is not None:
        if layer.family.table_positions:
            _read(model, layer, ids)
        return table.weight.new_zeros(())  # type: ignore[no-any-return]
    places = layer.family.places(ids)
    term: Any = posenc.embedding(layer.scheme, places, {"table": table.weight}, xp=xp)
    return term.to(table.weight.dtype)  # type: ignore[no-any-return]


def _read(model: Any, layer: Layer, ids: Tensor) -> None:
    """The positions of layers that get none, which a layer computed again would not find."""
    layer.positions.read(ids, layer.family)
    repeats = model.training and getattr(model, "gradient_checkpointing", False)
    if repeats and not layer.positions.default:
        raise NotImplementedError(
            "position_ids with gradient checkpointing: layers of this model get no position_ids, "
            "so one that is computed again may read those of another pass; leave one of them out"
        )


def _from_zero(position_ids: Tensor) -> Tensor:
    """OPT gives padding the position -1; nothing sees it."""
    return position_ids.clamp(min=0)


EMBEDDINGS = {
    "gpt2": Family(
        attention="attn", cross="crossattention", rotary=None,
        prepare=PositionTable("wpe").prepare,
    ),
    "opt": Family(rotary=None, places=_from_zero, prepare=PositionTable("embed_positions").prepare),
}  # fmt: skip
"""The families of this file, by ``model_type``."""
