"""The study's decoder in PyTorch: ``posenc.study.Decoder`` says what it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from posenc.study import NORM_EPSILON, Decoder, embedding_scale
from posenc_torch.bound import Attend, Bound


class DecoderModel:
    """Logits ``(N, T, V)`` of tokens ``(N, T)`` and a pass over the layers.

    Products are of the recipe's dtype; weights, norms, logits and the sum of all layers' outputs
    are float32.

    Attributes
    ----------
    weights
        The trained parameters by name.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._recipe = decoder.recipe
        self._dtype = getattr(torch, decoder.recipe.dtype)
        self._scale = embedding_scale(decoder.recipe)
        self.weights = {
            name: nn.Parameter(torch.tensor(value, device=device))
            for name, value in decoder.weights.items()
        }

    def __call__(self, tokens: Tensor, bound: Bound, step: int | None = None) -> Tensor:
        """Logits; nothing is drawn, so they do not depend on the step."""
        w = self.weights
        x = functional.embedding(tokens, w["embed"]) * self._scale
        x = bound.embed(x)
        for layer, attend in enumerate(bound):
            x = self._layer(x, layer, attend)
        head = w["head"] if "head" in w else w["embed"].T
        return (self._norm(x, "norm") @ head.to(self._dtype)).float()

    def _layer(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        def weight(name: str) -> Tensor:
            return self.weights[f"{layer}.{name}"].to(self._dtype)

        batch, length, dim = x.shape
        hidden = self._norm(x, f"{layer}.norm1")
        heads = (hidden @ weight("qkv")).view(batch, length, 3, self._recipe.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        out = attend(q, k, v, x=hidden)
        x = x + out.transpose(1, 2).reshape(batch, length, dim) @ weight("out")
        hidden = self._norm(x, f"{layer}.norm2")
        return x + functional.gelu(hidden @ weight("up"), approximate="tanh") @ weight("down")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.weights[name]
        return functional.layer_norm(x, x.shape[-1:], gain, eps=NORM_EPSILON).to(self._dtype)
