"""The study's decoder in PyTorch: eager, float32, one training step at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from posenc.backend import (
    PositionScheme,
    attention_part,
)
from posenc.study import (
    BETAS,
    NORM_EPSILON,
    Decoder,
    has_weight_decay,
    learning_rate,
)
from posenc_torch.api import attention
from posenc_torch.position import Position

_TOKENS = 32768  # in one evaluation batch


class Trainer:
    """Trains and scores one decoder; see ``posenc.study.Trainer``."""

    def __init__(self, decoder: Decoder, device: str, scratch: Path | None = None) -> None:
        torch.set_num_threads(1)
        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._device, self._recipe = torch.device(name), decoder.recipe
        self._decoder = decoder
        self._weights = {
            name: nn.Parameter(torch.tensor(value, device=self._device))
            for name, value in decoder.weights.items()
        }
        self._position = [
            _position(decoder.schemes[layer], arrays, self._device)
            for layer, arrays in zip(decoder.first_layers, decoder.position, strict=True)
        ]
        self._optimizer = torch.optim.AdamW(self._groups(), betas=BETAS, fused=True)

    def train(self, batches: Any, first_step: int) -> Any:
        losses, layers = [], (self._decoder.schemes, self._decoder.windows())
        for step, tokens in enumerate(batches, first_step):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(self._recipe, step) * group["factor"]
            loss = self._losses(self._tensor(tokens), *layers).mean()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in PyTorch
            nn.utils.clip_grad_norm_(self._parameters(), self._recipe.clip)
            self._optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).cpu().numpy()

    @torch.no_grad()
    def token_losses(self, tokens: Any, window: int | None) -> Any:
        length = tokens.shape[1] - 1
        layers = (self._decoder.at_length(length), self._decoder.windows(window))
        parts = [
            self._losses(self._tensor(part), *layers).cpu().numpy()
            for part in np.split(tokens, range(0, len(tokens), max(1, _TOKENS // length))[1:])
        ]
        return np.concatenate(parts)

    def versions(self) -> dict[str, str]:
        on_cpu = self._device.type == "cpu"
        name = "cpu" if on_cpu else torch.cuda.get_device_name(self._device)
        return {"torch": torch.__version__, "device": name}

    def _losses(
        self,
        tokens: Tensor,
        schemes: tuple[PositionScheme, ...],
        windows: tuple[int | None, ...],
    ) -> Tensor:
        """Losses ``(N, L)`` of the next bytes of ``tokens (N, L + 1)``; one window per layer."""
        w, dim = self._weights, self._recipe.dim
        x = functional.embedding(tokens[:, :-1], w["embed"]) * math.sqrt(dim)
        for position in self._position:
            x = position.embed(x)
        for layer, (scheme, window) in enumerate(zip(schemes, windows, strict=True)):
            x = self._layer(x, layer, scheme, window)
        logits = self._norm(x, "norm") @ w["embed"].T
        return functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        ).view(len(tokens), -1)

    def _layer(self, x: Tensor, layer: int, scheme: PositionScheme, window: int | None) -> Tensor:
        def weight(name: str) -> Tensor:
            return self._weights[f"{layer}.{name}"]

        batch, length, dim = x.shape
        hidden = self._norm(x, f"{layer}.norm1")
        heads = (hidden @ weight("qkv")).view(batch, length, 3, self._recipe.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        position = self._position[self._decoder.owners[layer]]
        scheme_and_params = attention_part(scheme, position.params)
        out = attention(q, k, v, *scheme_and_params, causal=True, window=window, x=hidden)
        x = x + out.transpose(1, 2).reshape(batch, length, dim) @ weight("out")
        hidden = self._norm(x, f"{layer}.norm2")
        return x + functional.gelu(hidden @ weight("up"), approximate="tanh") @ weight("down")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self._weights[name], eps=NORM_EPSILON)

    def _groups(self) -> list[dict[str, Any]]:
        recipe = self._recipe
        decayed = [p for name, p in self._weights.items() if has_weight_decay(name)]
        others = [p for name, p in self._weights.items() if not has_weight_decay(name)]
        position_params = [p for position in self._position for p in position.parameters()]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": recipe.weight_decay, "factor": 1.0},
            {"params": others, "weight_decay": 0.0, "factor": 1.0},
            {
                "params": position_params,
                "weight_decay": 0.0,
                "factor": recipe.position_lr_scale,
            },
        ]
        return [group for group in groups if group["params"]]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _tensor(self, tokens: Any) -> Tensor:
        return torch.from_numpy(tokens.astype(np.int64)).to(self._device)


def _position(scheme: PositionScheme, arrays: dict[str, Any], device: torch.device) -> Position:
    module = Position(scheme, device=device)
    module.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})
    return module
