"""How long a study will take on this machine, before it starts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from posenc.study.recipe import Recipe

_SHARE = 0.4  # of a product's speed that training reaches, measured with JAX on two processors
_SIDE, _PRODUCTS = 64, 50
_START = 9.0  # seconds to compile the programs of a run, and to score it


def estimate(recipes: Iterable[tuple[Recipe, int]], workers: int) -> float:
    """Seconds for so many trainings of each recipe, if none ends early.

    Training is taken to reach a fixed share of the speed of a matrix product, measured here.
    """
    speed = _product_speed()
    return sum(
        trainings * (_START + recipe.steps * _operations(recipe) / (_SHARE * speed))
        for recipe, trainings in recipes
    ) / max(1, workers)


def _operations(recipe: Recipe) -> float:
    """Multiplications and additions of a training step."""
    length, dim = recipe.train_tokens, recipe.dim
    weights = 12 * recipe.layers * dim * dim + recipe.of_task.vocabulary * dim
    return 6.0 * recipe.batch_size * length * (weights + recipe.layers * length * dim)


def _product_speed() -> float:
    """Operations per second of one core, in products too small for a second one."""
    a = np.ones((_SIDE, _SIDE), np.float32)
    return 2.0 * _PRODUCTS * _SIDE**3 / min(_seconds(a) for _ in range(20))


def _seconds(a: Any) -> float:
    begin = time.perf_counter()
    for _ in range(_PRODUCTS):
        a @ a
    return time.perf_counter() - begin
