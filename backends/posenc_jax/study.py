"""Models of one's own in a study: params and a function of them, called with a pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from posenc.study import Decoder, Recipe, load_model
from posenc_jax.bound import Bound


class OwnModel:
    """A function makes an object with ``apply(params, tokens (N, T), bound) -> logits (N, T, V)``.

    ``bound`` is ``Positions.bind`` of the study, whose learned arrays the trainer holds.

    Attributes
    ----------
    weights
        What ``init(seed)`` returns, any pytree of floating arrays; or kept weights.

    Raises
    ------
    ImportError, TypeError, ValueError
        The function cannot be imported, makes no such object, or draws other params the second
        time.
    """

    def __init__(self, decoder: Decoder) -> None:
        name, made = decoder.recipe.model, _made(decoder.recipe.training())
        self.weights, again = (made.init(decoder.seed) for _ in range(2))
        flat = jax.tree_util.tree_flatten_with_path(self.weights)[0]
        others: Any = dict(jax.tree_util.tree_flatten_with_path(again)[0])
        if others.keys() != dict(flat).keys():
            raise ValueError(f"model {name!r} makes another tree of params the second time")
        for path, leaf in flat:
            at, other = jax.tree_util.keystr(path), others[path]
            if getattr(leaf, "dtype", None) not in (jnp.float32, jnp.float64):
                kind = getattr(leaf, "dtype", type(leaf).__name__)
                raise TypeError(
                    f"model {name!r} has params{at} of {kind}; accepted: arrays of float32 or "
                    "float64. Keep what is not trained in the object that has apply"
                )
            if not np.array_equal(leaf, other):
                raise ValueError(
                    f"model {name!r} draws other params{at} the second time from one seed, so "
                    "schemes would begin at different ones; draw from the seed of init alone"
                )
        if decoder.weights:
            names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
            if decoder.weights.keys() != {*names}:
                raise ValueError(
                    f"model {name!r} has params {sorted(names)}, and those that were kept are "
                    f"{sorted(decoder.weights)}"
                )
            leaves = [jnp.asarray(decoder.weights[each]) for each in names]
            self.weights = jax.tree.unflatten(jax.tree.structure(self.weights), leaves)


def own_logits(recipe: Recipe, params: Any, tokens: Array, bound: Bound) -> Array:
    """Logits of the model of one's own of a recipe."""
    logits = _made(recipe.training()).apply(params, tokens, bound)
    if not hasattr(logits, "astype"):
        name = type(logits).__name__
        raise TypeError(f"model {recipe.model!r}: apply must return an array of logits, got {name}")
    return jnp.asarray(logits).astype(jnp.promote_types(logits.dtype, jnp.float32))


@functools.lru_cache(maxsize=8)
def _made(recipe: Recipe) -> Any:
    """The object with ``init`` and ``apply``, made once per recipe, which names its function."""
    made = load_model(recipe.model)(recipe)
    missing = [name for name in ("init", "apply") if not callable(getattr(made, name, None))]
    if missing:
        raise TypeError(
            f"model {recipe.model!r} must make an object with init(seed) and apply(params, tokens, "
            f"bound), got {type(made).__name__} without {' and '.join(missing)}; a model in "
            "PyTorch trains with backend torch"
        )
    return made
