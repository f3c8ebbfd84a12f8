"""Training and scores of a study in PyTorch: eager, float32, one training step at a time."""

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
from posenc.study import BETAS, NO_ANSWER, Decoder, Layers, check_model
from posenc_torch.bound import Bound, PlainLayer
from posenc_torch.decoder import DecoderModel
from posenc_torch.position import Position
from posenc_torch.study import OwnModel

_TOKENS = 32768  # in one evaluation batch


class Trainer:
    """Trains and scores one model; see ``posenc.study.Trainer``."""

    trains_models = True
    computes = ("dtype", "accumulate", "compile")

    def __init__(self, decoder: Decoder, device: str, scratch: Path | None = None) -> None:
        torch.set_num_threads(1)
        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._device, self._recipe = torch.device(name), decoder.recipe
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"there is no GPU for PyTorch {torch.__version__}")
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._decoder = decoder
        kind = OwnModel if self._recipe.model else DecoderModel
        self._model = kind(decoder, self._device)
        self._weights, self._steps = self._model.weights, 0
        self._compiled: dict[Layers, Any] = {}
        self._position = [
            _position(decoder.schemes[layer], arrays, self._device)
            for layer, arrays in zip(decoder.first_layers, decoder.position, strict=True)
        ]
        self._optimizer = torch.optim.AdamW(self._groups(), betas=BETAS, fused=True)
        self.gradient_norms: Any = np.zeros(0, np.float32)
        if self._recipe.model:
            check_model(decoder, self._trace, self.logits)

    def train(
        self, tokens: Any, labels: Any, rates: Any, positions: Any = None, plan: Any = None
    ) -> Any:
        losses, norms, layers = [], [], self._decoder.layers(plan)
        for index, rate in enumerate(rates):
            for group in self._optimizer.param_groups:
                group["lr"] = float(rate) * group["factor"]
            pos = None if positions is None else self._positions(positions[index])
            self._optimizer.zero_grad()
            mean = self._backward(tokens[index], labels[index], layers, pos)
            norms.append(nn.utils.clip_grad_norm_(self._parameters(), self._recipe.clip))
            self._optimizer.step()
            self._steps += 1
            losses.append(mean.detach())
        self.gradient_norms = torch.stack(norms).cpu().numpy()
        return torch.stack(losses).cpu().numpy()

    def _backward(self, tokens: Any, labels: Any, layers: Layers, pos: Tensor | None) -> Tensor:
        """Add the gradients of the mean loss of a batch, computed in parts; the loss."""
        count = self._recipe.accumulate
        given = self._tensor(tokens), self._tensor(labels)
        parts = zip(*(each.chunk(count) for each in given), strict=True)
        answers = (given[1] != NO_ANSWER).sum()
        # A number would be compiled anew for each step; only a model of one's own draws by it.
        step = None if self._recipe.compile else self._steps
        means = []
        for part in parts:
            mean = self._step(layers)(*part, pos, answers, step)
            mean.backward()
            means.append(mean)
        return means[0] if len(means) == 1 else torch.stack(means).sum()

    def _step(self, layers: Layers) -> Any:
        """What a part adds to the mean loss; compiled once for its layers, if asked for."""
        if layers not in self._compiled:

            def mean(
                tokens: Tensor, labels: Tensor, pos: Tensor | None, count: Tensor, step: int | None
            ) -> Tensor:
                return self._losses(tokens, labels, layers, pos, step)[0].sum() / count

            asked = self._recipe.compile
            self._compiled[layers] = torch.compile(mean, dynamic=False) if asked else mean
        return self._compiled[layers]

    @torch.no_grad()
    def answers(self, tokens: Any, labels: Any, window: int | None, plan: Any = None) -> Any:
        length = tokens.shape[1]
        layers = self._decoder.layers(plan, length=length, window=window)
        cuts = range(0, len(tokens), max(1, _TOKENS // length))[1:]
        losses, hits = [], []
        for part in zip(np.split(tokens, cuts), np.split(labels, cuts), strict=True):
            asked, right = map(self._tensor, part)
            loss, logits = self._losses(asked, right, layers)
            hit = logits.argmax(-1) == right
            losses.append(loss.cpu().numpy())
            hits.append(hit.cpu().numpy())
        return np.concatenate(losses), np.concatenate(hits)

    @torch.no_grad()
    def logits(self, tokens: Any, window: int | None = None, plan: Any = None) -> Any:
        length = tokens.shape[1]
        layers = self._decoder.layers(plan, length=length, window=window)
        parts = np.split(tokens, range(0, len(tokens), max(1, _TOKENS // length))[1:])
        found = [self._logits(self._tensor(part), layers) for part in parts]
        return np.concatenate([logits.cpu().numpy() for logits in found])

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
        steps = [int(state[name]) for name in state if name.startswith("optimizer.step.")]
        self._steps = max(steps, default=0)
        for name, param in self._by_name().items():
            param.copy_(torch.from_numpy(state[name]))
            names = {part: f"optimizer.{part}.{name}" for part in parts}
            # A param that had no gradient yet has no moments.
            self._optimizer.state[param] = {
                part: torch.tensor(state[key], device=self._device)
                for part, key in names.items()
                if key in state
            }

    @staticmethod
    def device_memory() -> int:
        """The most bytes of the GPU since a trainer was made; 0 on a CPU."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in PyTorch
            return 0
        return torch.cuda.max_memory_allocated()

    def versions(self) -> dict[str, str]:
        on_cpu = self._device.type == "cpu"
        name = "cpu" if on_cpu else torch.cuda.get_device_name(self._device)
        return {"torch": torch.__version__, "device": name}

    def _losses(
        self,
        tokens: Tensor,
        labels: Tensor,
        layers: Layers,
        pos: Tensor | None = None,
        step: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Losses ``(N, T)`` of the answers, 0 for none, and the logits."""
        logits = self._logits(tokens, layers, pos, step)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=NO_ANSWER
        )
        return loss.view(labels.shape), logits

    def _logits(
        self, tokens: Tensor, layers: Layers, pos: Tensor | None = None, step: int | None = None
    ) -> Tensor:
        """``(N, T, V)``, at positions 0, 1, ... or others, in a step or at test time."""
        return self._model(tokens, self._bound(layers, pos), step)

    @torch.no_grad()
    def _trace(self, tokens: Any, watch: Any) -> Any:
        """The shape of the logits of a model that is called with ``watch(bound)``."""
        layers = self._decoder.layers(length=tokens.shape[1])
        return self._model(self._tensor(tokens), watch(self._bound(layers, None))).shape

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

        def embed(x: Tensor, pos: Tensor | None) -> Tensor:
            at = torch.arange(x.shape[-2], device=x.device) if pos is None else pos
            for layer in layers.embedding:
                term = embedding(layers.schemes[layer], at, own[layer].params, xp=xp)
                x = x if term is None else add_embedding(x, term, xp=xp)
            return x

        facts = LayerFacts.of(layers.schemes, layers.windows, layers.owners, layers.rotary)
        given = arguments_of_pass(Tokens(pos), None, ..., None)
        return Bound(own, facts, embed, given, causal=True)

    def _groups(self) -> list[dict[str, Any]]:
        recipe = self._recipe
        decayed = [p for p in self._weights.values() if p.ndim >= 2]
        others = [p for p in self._weights.values() if p.ndim < 2]
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
