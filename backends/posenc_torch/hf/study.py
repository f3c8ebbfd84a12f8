"""A causal model of transformers as a model of one's own in a study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posenc.backend import LayerPlan
from posenc_torch.bound import Bound
from posenc_torch.hf.learned import NAME
from posenc_torch.hf.model import apply


class ForStudy(nn.Module):
    """``forward(tokens (N, T), bound) -> logits (N, T, V)`` of a causal model of transformers.

    What the function of ``posenc.study.Study(model=...)`` returns. The model computes positions and
    attention with the scheme and window that ``bound``, a pass of the study, has for each layer. It
    keeps its norms of queries and keys, softmax scale, caps and sinks, as with ``apply``.

    Parameters
    ----------
    model
        A model of one of the ``FAMILIES`` with a head of logits, changed in place, with as many
        layers and heads as the study.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._plan: LayerPlan | None = None
        self._arrays = _Arrays()

    def forward(self, tokens: Tensor, bound: Bound) -> Tensor:
        if bound.plan != self._plan:
            with torch.random.fork_rng([]):  # first values, which are not used
                apply(self.model, bound.plan, fresh=True)
            delattr(self.model, NAME)  # its arrays are those of the study
            setattr(self.model, NAME, self._arrays)
            self._plan = bound.plan
        self._arrays.bound = bound
        self._arrays.params = [bound.params(layer) for layer in range(len(bound))]
        pos = bound.given.of_keys.pos
        ids = None if pos is None else pos.expand(tokens.shape)
        model: Any = self.model
        logits: Tensor = model(input_ids=tokens, position_ids=ids, use_cache=False).logits
        return logits


class _Arrays:
    """Stands for ``Learned``: the arrays of a pass, which are no parameters of the model."""

    bound: Bound
    params: list[Mapping[str, Tensor]]

    def __call__(self, layer: int | None, hidden: Any = None, places: Any = None) -> Any:
        """The arrays of a layer; for None, ``hidden`` with the embeddings of the pass."""
        return self.bound.embed(hidden) if layer is None else self.params[layer]
