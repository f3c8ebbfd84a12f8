"""How long a study will take on this machine, before it starts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from posenc.study.recipe import Recipe

_SHARE = 0.25  # of a product's speed that training reaches, measured with JAX on two processors
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
    """Operations per second of one core, in a product as large as a training step's."""
    a, b = np.ones((1024, 64), np.float32), np.ones((64, 192), np.float32)
    best = min(_seconds(a, b) for _ in range(20))
    return 2.0 * a.shape[0] * a.shape[1] * b.shape[1] / best


def _seconds(a: Any, b: Any) -> float:
    begin = time.perf_counter()
    a @ b
    return time.perf_counter() - begin
