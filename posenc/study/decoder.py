"""The decoder that every scheme trains: its shape and initial weights, the same in any backend.

Pre-norm, no biases:
``h = s * E[tokens] + embedding``; a layer adds ``attention(norm(h)) @ out`` and then
``gelu(norm(h) @ up) @ down``; ``logits = norm(h) @ head``, with ``s = 1``, or ``norm(h) @ E.T``,
with ``s = sqrt(d)``, if the task ties them, as text does. GELU is the tanh form, norms are layer
norms with a gain and ``eps = 1e-5``.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posenc.contract.params import init_params
from posenc.contract.protocol import PositionScheme
from posenc.layers import LayerPlan, rotary_layers
from posenc.study.recipe import Recipe

NORM_EPSILON = 1e-5
_OF_WEIGHTS = "weights."  # names of a trainer's state

Weights = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Decoder:
    """Shape, schemes and initial values of one model.

    Attributes
    ----------
    recipe
        Sizes and training.
    plan
        Scheme and window of each layer, and which layers share position params.
    weights
        By name: ``embed (V, d)``, for ``V`` tokens, and ``head (d, V)`` if it is not tied; per
        layer ``qkv (d, 3d)``, ``out (d, d)``, ``up (d, 4d)``, ``down (4d, d)``, gains ``norm1``,
        ``norm2 (d,)``; ``norm (d,)`` at the end.
        Of a model of one's own those that were kept; empty to let it draw them.
    position
        Learned arrays of the schemes, one mapping per set of params.
    seed
        Of the initial values.
    """

    recipe: Recipe
    plan: LayerPlan
    weights: Weights
    position: tuple[Weights, ...]
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe, plan: LayerPlan, seed: int) -> Decoder:
        """Initial values: one generator draws the shared weights, others each scheme's params."""
        position = tuple(
            init_params(plan.schemes[layer], [seed, 1, n])
            for n, layer in enumerate(plan.first_layers)
        )
        weights = {} if recipe.model else _weights(recipe, seed)
        return cls(recipe, plan, weights, position, seed)

    def with_weights_of(self, state: Weights) -> Decoder:
        """The same with the weights of a trainer's ``state``."""
        own = [name for name in state if name.startswith(_OF_WEIGHTS)]
        return replace(self, weights={n.removeprefix(_OF_WEIGHTS): state[n] for n in own})

    @property
    def schemes(self) -> tuple[PositionScheme, ...]:
        """One per layer."""
        return self.plan.schemes

    @property
    def owners(self) -> tuple[int, ...]:
        """Which set of position params serves each layer."""
        return self.plan.owners

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The first layer of each set of position params."""
        return self.plan.first_layers

    def layers(
        self,
        plan: LayerPlan | None = None,
        *,
        length: int | None = None,
        window: int | None = None,
    ) -> Layers:
        """How one pass through the model sees positions.

        Parameters
        ----------
        plan
            Schemes and windows; default: those of training.
        length
            Tokens of the context, at test time; None in training.
        window
            Narrows wider windows, and gives one to layers without.
        """
        plan = self.plan if plan is None else plan
        schemes = plan.schemes
        if length is not None:
            schemes = tuple(scheme.at_length(length) for scheme in schemes)
        return Layers(schemes, plan.windows_within(window), self.owners, plan.first_layers)

    def digest(self) -> str:
        """SHA-256 of the weights that all schemes share."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(self.weights[name].tobytes())
        return digest.hexdigest()

    def sizes(self) -> dict[str, int]:
        """Number of parameters: in total, and of the position schemes."""
        own = sum(a.size for arrays in self.position for a in arrays.values())
        return {"total": own + sum(a.size for a in self.weights.values()), "position": own}


@dataclass(frozen=True)
class Layers:
    """The layers' part of position in one pass; hashable, so that programs can be kept by it.

    Attributes
    ----------
    schemes, windows
        One per layer.
    owners
        Which set of position params serves each layer. The scheme of the layer may need only some
        of its arrays.
    embedding
        The layers whose embedding is added at the input.
    """

    schemes: tuple[PositionScheme, ...]
    windows: tuple[int | None, ...]
    owners: tuple[int, ...]
    embedding: tuple[int, ...]

    @property
    def rotary(self) -> tuple[int, ...]:
        """For each layer, the first layer whose ``posenc.rotary`` it can use."""
        return rotary_layers(self.schemes, self.owners)


def embedding_scale(recipe: Recipe) -> float:
    """The factor of token embeddings: ``sqrt(d)`` where they are the matrix of logits too, else 1.

    The embeddings of tokens then have a variance of 1 either way.
    """
    return math.sqrt(recipe.dim) if recipe.of_task.tied else 1.0


def has_weight_decay(name: str) -> bool:
    """Whether weight decay applies: to matrices, not to gains."""
    return "norm" not in name


def _weights(recipe: Recipe, seed: int) -> Weights:
    """Normal with std ``fan_in ** -0.5``, times ``(2 layers) ** -0.5`` for residual projections."""
    rng = np.random.default_rng([seed, 0])
    d, residual = recipe.dim, (2 * recipe.layers) ** -0.5

    def normal(rows: int, columns: int, factor: float = 1.0) -> np.ndarray[Any, Any]:
        std = factor / math.sqrt(rows)
        return np.asarray(std * rng.standard_normal((rows, columns)), dtype=np.float32)

    task = recipe.of_task
    vocabulary = task.vocabulary
    std = embedding_scale(recipe) ** -1.0
    weights = {"embed": normal(vocabulary, d, std * vocabulary**0.5)}
    for layer in range(recipe.layers):
        initial = {
            "qkv": normal(d, 3 * d),
            "out": normal(d, d, residual),
            "up": normal(d, 4 * d),
            "down": normal(4 * d, d, residual),
            "norm1": np.ones(d, np.float32),
            "norm2": np.ones(d, np.float32),
        }
        weights |= {f"{layer}.{name}": value for name, value in initial.items()}
    head = {} if task.tied else {"head": normal(d, vocabulary)}
    return weights | {"norm": np.ones(d, np.float32)} | head
