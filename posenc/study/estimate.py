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


def estimate(recipes: Iterable[tuple[Recipe, int, int]], workers: int) -> float:
    """Seconds for so many trainings of each recipe, and so many runs, if none ends early.

    Training is taken to reach a fixed share of the speed of a matrix product, measured here. A run
    is fine-tuned and slides on its own.
    """
    speed = _SHARE * _product_speed()
    return sum(
        trainings * (_START + recipe.steps * _operations(recipe) / speed)
        + runs * (_finetuning(recipe, speed) + _sliding(recipe) / speed)
        for recipe, trainings, runs in recipes
    ) / max(1, workers)


def _finetuning(recipe: Recipe, speed: float) -> float:
    """Seconds of a run's fine-tuning: it compiles on its own, and is scored before and after."""
    if not recipe.finetune_steps:
        return 0.0
    tuning = recipe.finetuning()
    return 2 * _START + tuning.steps * _operations(tuning) / speed


def _sliding(recipe: Recipe) -> float:
    """Multiplications and additions of sliding windows: a third of those of training on them."""
    if not recipe.stride:
        return 0.0
    times = 2 if recipe.finetune_steps else 1  # before it, and after it
    counts = {n: (recipe.longest - n) // recipe.stride + 1 for n in recipe.eval_lens}
    windows = {n: recipe.eval_windows * count for n, count in counts.items()}
    return times * sum(_forward(recipe, n, count) for n, count in windows.items())


def _operations(recipe: Recipe) -> float:
    """Multiplications and additions of a training step."""
    return 3 * _forward(recipe, recipe.train_tokens, recipe.batch_size)


def _forward(recipe: Recipe, length: int, sequences: int) -> float:
    """Those of a pass without gradients."""
    weights = 12 * recipe.layers * recipe.dim**2 + recipe.of_task.vocabulary * recipe.dim
    return 2.0 * sequences * length * (weights + recipe.layers * length * recipe.dim)


def _product_speed() -> float:
    """Operations per second of one core, in products too small for a second one."""
    a = np.ones((_SIDE, _SIDE), np.float32)
    return 2.0 * _PRODUCTS * _SIDE**3 / min(_seconds(a) for _ in range(20))


def _seconds(a: Any) -> float:
    begin = time.perf_counter()
    for _ in range(_PRODUCTS):
        a @ a
    return time.perf_counter() - begin
