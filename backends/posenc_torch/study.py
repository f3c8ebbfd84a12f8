"""Models of one's own in a study: a module that ``function(recipe)`` makes, called with a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posenc.study import Decoder, Recipe, load_model
from posenc_torch.bound import Bound


class OwnModel:
    """``module(tokens (N, T), bound) -> logits (N, T, V)``, made by the function of a recipe.

    ``bound`` is ``Positions.bind`` of the study, whose learned arrays the trainer holds. The
    function draws its weights from PyTorch's generator, which has the seed of the run.

    Attributes
    ----------
    weights
        The trained parameters by name: drawn, or those of the decoder, if it has any.

    Raises
    ------
    ImportError, TypeError, ValueError
        The function cannot be imported, makes no module, makes weights that are not float32 or
        float64, or draws others the second time.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        recipe, self._seed, self._device = decoder.recipe, decoder.seed, device
        function = load_model(recipe.model)
        module, again = (_made(function, recipe.training(), self._seed) for _ in range(2))
        arrays = dict(module.named_parameters())
        for name, other in again.named_parameters():
            if name not in arrays or not torch.equal(arrays[name], other):
                raise ValueError(
                    f"model {recipe.model!r} draws other weights {name!r} the second time from one "
                    "seed, so schemes would begin at different ones; draw with PyTorch's generator"
                )
        for name, array in arrays.items():
            if array.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"model {recipe.model!r} has weights {name!r} of {array.dtype}; accepted: "
                    "float32, float64. It may compute in another type, as under torch.autocast"
                )
        self._module = module.to(device)
        self.weights = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        if decoder.weights:
            self._take(recipe.model, decoder.weights)

    def __call__(self, tokens: Tensor, bound: Bound, step: int | None = None) -> Tensor:
        """Logits in training, at a step that decides what dropout draws; None for test time."""
        self._module.train(step is not None)
        if step is None:
            return self._logits(tokens, bound)
        with torch.random.fork_rng([] if self._device.type == "cpu" else [self._device]):
            torch.manual_seed(self._seed * 2**32 + step)
            return self._logits(tokens, bound)

    @torch.no_grad()
    def _take(self, name: str, kept: Mapping[str, Any]) -> None:
        """Take kept weights in place of those that were drawn."""
        if kept.keys() != self.weights.keys():
            raise ValueError(
                f"model {name!r} has weights {sorted(self.weights)}, and those that were kept are "
                f"{sorted(kept)}"
            )
        for key, array in kept.items():
            self.weights[key].copy_(torch.from_numpy(array))

    def _logits(self, tokens: Tensor, bound: Bound) -> Tensor:
        logits: Any = self._module(tokens, bound)
        if not isinstance(logits, Tensor):
            name = type(self._module).__name__
            raise TypeError(f"{name} must return a tensor of logits, got {type(logits).__name__}")
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _made(function: Callable[..., Any], recipe: Recipe, seed: int) -> nn.Module:
    """A new module, with the weights of a seed; the generator of the process stays as it was."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        module = function(recipe)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"model {recipe.model!r} must make a torch.nn.Module, got {type(module).__name__}; "
            "a model in JAX trains with backend jax"
        )
    return module
