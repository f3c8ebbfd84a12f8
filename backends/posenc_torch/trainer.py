"""The study's decoder in PyTorch: eager, float32, one training step at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from posenc import Tokens
from posenc.backend import (
    LayerFacts,
    PositionScheme,
    add_embedding,
    arguments_of_pass,
    embedding,
)
from posenc.study import (
    BETAS,
    NO_ANSWER,
    NORM_EPSILON,
    Decoder,
    Layers,
    embedding_scale,
    has_weight_decay,
)
from posenc_torch.bound import Attend, Bound, PlainLayer
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
        self.gradient_norms: Any = np.zeros(0, np.float32)

    def train(
        self, tokens: Any, labels: Any, rates: Any, positions: Any = None, plan: Any = None
    ) -> Any:
        losses, norms, layers = [], [], self._decoder.layers(plan)
        for index, rate in enumerate(rates):
            for group in self._optimizer.param_groups:
                group["lr"] = float(rate) * group["factor"]
            pos = None if positions is None else self._positions(positions[index])
            loss, asked, _ = self._losses(tokens[index], labels[index], layers, pos)
            mean = loss.sum() / asked.sum()
            self._optimizer.zero_grad()
            mean.backward()  # type: ignore[no-untyped-call]  # untyped in PyTorch
            norms.append(nn.utils.clip_grad_norm_(self._parameters(), self._recipe.clip))
            self._optimizer.step()
            losses.append(mean.detach())
        self.gradient_norms = torch.stack(norms).cpu().numpy()
        return torch.stack(losses).cpu().numpy()

    @torch.no_grad()
    def answers(self, tokens: Any, labels: Any, window: int | None, plan: Any = None) -> Any:
        length = tokens.shape[1]
        layers = self._decoder.layers(plan, length=length, window=window)
        cuts = range(0, len(tokens), max(1, _TOKENS // length))[1:]
        losses, hits = [], []
        for part in zip(np.split(tokens, cuts), np.split(labels, cuts), strict=True):
            loss, _, logits = self._losses(*part, layers)
            hit = logits.argmax(-1) == self._tensor(part[1])
            losses.append(loss.cpu().numpy())
            hits.append(hit.cpu().numpy())
        return np.concatenate(losses), np.concatenate(hits)

    @torch.no_grad()
    def logits(self, tokens: Any, window: int | None = None, plan: Any = None) -> Any:
        length = tokens.shape[1]
        layers = self._decoder.layers(plan, length=length, window=window)
        parts = np.split(tokens, range(0, len(tokens), max(1, _TOKENS // length))[1:])
        return np.concatenate([self._logits(part, layers).cpu().numpy() for part in parts])

    def state(self) -> dict[str, Any]:
        arrays, params = {}, self._by_name()
        for name, param in params.items():
            arrays[name] = _array(param)
            for part, value in self._optimizer.state.get(param, {}).items():
                arrays[f"optimizer.{part}.{name}"] = _array(value)
        return arrays

    @torch.no_grad()
    def load_state(self, state: Any) -> None:
        parts = {name.split(".")[1] for name in state if name.startswith("optimizer.")}
        for name, param in self._by_name().items():
            param.copy_(torch.from_numpy(state[name]))
            names = {part: f"optimizer.{part}.{name}" for part in parts}
            # A param that had no gradient yet has no moments.
            self._optimizer.state[param] = {
                part: torch.tensor(state[key], device=self._device)
                for part, key in names.items()
                if key in state
            }

    def versions(self) -> dict[str, str]:
        on_cpu = self._device.type == "cpu"
        name = "cpu" if on_cpu else torch.cuda.get_device_name(self._device)
        return {"torch": torch.__version__, "device": name}

    def _losses(
        self, tokens: Any, labels: Any, layers: Layers, pos: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses ``(N, T)`` of the answers, 0 for none; which there are; and the logits."""
        logits, targets = self._logits(tokens, layers, pos), self._tensor(labels)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=NO_ANSWER
        )
        return loss.view(targets.shape), targets != NO_ANSWER, logits

    def _logits(self, tokens: Any, layers: Layers, pos: Tensor | None = None) -> Tensor:
        """``(N, T, V)``, at positions 0, 1, ... or others."""
        w = self._weights
        x = functional.embedding(self._tensor(tokens), w["embed"]) * embedding_scale(self._recipe)
        at = torch.arange(x.shape[1], device=x.device) if pos is None else pos
        for layer in layers.embedding:
            term = embedding(layers.schemes[layer], at, self._params(layers, layer), xp=xp)
            x = x if term is None else add_embedding(x, term, xp=xp)
        for layer, attend in enumerate(self._bound(layers, pos)):
            x = self._layer(x, layer, attend)
        head = w["head"] if "head" in w else w["embed"].T
        return self._norm(x, "norm") @ head

    def _params(self, layers: Layers, layer: int) -> dict[str, Tensor]:
        """The learned arrays of the layer that its scheme needs."""
        params = self._position[layers.owners[layer]].params
        return {name: params[name] for name in layers.schemes[layer].param_specs()}

    def _bound(self, layers: Layers, pos: Tensor | None) -> Bound:
        """A pass over the layers, at positions 0, 1, ... or others."""
        own = [
            PlainLayer(scheme, self._params(layers, layer), layers.windows[layer])
            for layer, scheme in enumerate(layers.schemes)
        ]
        facts = LayerFacts.of(layers.schemes, layers.windows, layers.owners, layers.rotary)
        given = arguments_of_pass(Tokens(pos), None, ..., None)
        return Bound(own, facts, lambda x, _: x, given, causal=True)

    def _layer(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        def weight(name: str) -> Tensor:
            return self._weights[f"{layer}.{name}"]

        batch, length, dim = x.shape
        hidden = self._norm(x, f"{layer}.norm1")
        heads = (hidden @ weight("qkv")).view(batch, length, 3, self._recipe.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        out = attend(q, k, v, x=hidden)
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

    def _by_name(self) -> dict[str, nn.Parameter]:
        """All params under the names of ``state``."""
        found = {f"weights.{name}": param for name, param in self._weights.items()}
        for index, position in enumerate(self._position):
            for name, param in position.named_parameters():
                found[f"position.{index}.{name}"] = param
        return found

    def _tensor(self, tokens: Any) -> Tensor:
        return torch.from_numpy(tokens.astype(np.int64)).to(self._device)

    def _positions(self, positions: Any) -> Tensor:
        """Floats stay floats: the schemes refuse them, rather than this trainer truncate them."""
        kind = np.float32 if positions.dtype.kind == "f" else np.int64
        return torch.from_numpy(positions.astype(kind)).to(self._device)


def _array(tensor: Tensor) -> Any:
    """A copy on the host."""
    return tensor.detach().cpu().numpy().copy()


def _position(scheme: PositionScheme, arrays: dict[str, Any], device: torch.device) -> Position:
    module = Position(scheme, device=device)
    module.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})
    return module
