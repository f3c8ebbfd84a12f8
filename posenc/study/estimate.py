"""How long a study will take, and how much memory, before it starts."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.study.recipe import Recipe

_SHARE = 0.4  # of a product's speed that training reaches, measured with JAX on two processors
_SIDE, _PRODUCTS = 64, 50
_START = 9.0  # seconds to compile the programs of a run, and to score a small one
_GPU = "an H100 (SXM)"
_PEAK = 989e12  # its operations per second in bfloat16, dense: NVIDIA's data sheet
_GPU_SHARE = 0.25  # of it; language models of this size are reported at 0.2 to 0.5
_GPU_START = 60.0  # seconds to begin, and to compile the kernels of each length
_COMPILE = 30.0  # seconds of torch.compile for a training step
_STATE = 16  # bytes of a float32 parameter, its gradient and two moments
_WIDTHS = 24  # vectors of the model's width that a layer keeps for its backward pass
_LOGITS = 3  # of them: with their softmax and its gradient
_FRAMEWORK = 500e6  # bytes of a process that has imported a framework and compiled
_ROWS = 2048  # tokens of an evaluation batch, at least


@dataclass(frozen=True)
class Speed:
    """What a training is taken to reach: operations per second, and seconds to begin.

    ``said`` says where both come from.
    """

    operations: float
    start: float
    said: str


def estimate(
    recipes: Iterable[tuple[Recipe, int, int]], workers: int, speed: Speed | None = None
) -> float:
    """Seconds for so many trainings of each recipe, and so many runs, if none ends early.

    Training is taken to reach a fixed share of the speed of a matrix product, measured here. A run
    is fine-tuned and scored on its own.
    """
    reached = speed or speed_of("cpu")
    rate = reached.operations
    return sum(
        trainings * (_start(recipe, reached) + recipe.steps * _operations(recipe) / rate)
        + runs * (_finetuning(recipe, reached) + (_scoring(recipe) + _sliding(recipe)) / rate)
        for recipe, trainings, runs in recipes
    ) / max(1, workers)


@functools.cache
def speed_of(device: str) -> Speed:
    """The speed of a device: measured for this machine's processor, from a data sheet for others.

    A GPU is not asked: it may be that of another machine.
    """
    if device in ("auto", "cpu"):
        product = _product_speed()
        said = (
            f"training is taken to reach {_SHARE:g} of the speed of small matrix products, measured"
            f" now on one core ({product / 1e9:.0f} G operations/s), and {_START:.0f} s a training "
            f"are added to begin, {_COMPILE:.0f} s more for torch.compile"
        )
        return Speed(_SHARE * product, _START, said)
    said = (
        f"{device!r} is taken to be {_GPU} of which training reaches {_GPU_SHARE:g} of "
        f"{_PEAK / 1e12:.0f} T operations/s in bfloat16, and {_GPU_START:.0f} s a training are "
        f"added to begin, {_COMPILE:.0f} s more for torch.compile; float32 takes longer"
    )
    return Speed(_GPU_SHARE * _PEAK, _GPU_START, said)


def parameters(recipe: Recipe) -> int:
    """Parameters of the decoder, without those of a scheme."""
    embeddings = recipe.of_task.vocabulary * recipe.dim * (1 if recipe.of_task.tied else 2)
    return 12 * recipe.layers * recipe.dim**2 + embeddings


def memory_of(recipe: Recipe, device: str) -> float:
    """Bytes that a process needs to train and score, without what single schemes add.

    Weights, gradients and moments; what a micro-batch keeps for its backward pass; logits. On a
    processor also every score of attention, which kernels of a GPU do not keep.
    """
    length, rows = recipe.train_tokens, recipe.batch_size
    tokens, vocabulary = rows * length, recipe.of_task.vocabulary
    on_cpu = device in ("auto", "cpu")
    kept = recipe.layers * tokens * _WIDTHS * recipe.dim * 4.0
    if on_cpu:
        kept += recipe.layers * rows * recipe.heads * length**2 * 2 * 4.0
    training = kept + _LOGITS * tokens * vocabulary * 4.0
    longest = recipe.longest_tokens
    scoring = 2.0 * max(_ROWS, longest) * vocabulary * 4.0
    if on_cpu:
        scoring += 3.0 * max(1, _ROWS // longest) * recipe.heads * longest**2 * 4.0
    return _FRAMEWORK + _STATE * parameters(recipe) + max(training, scoring)


def _start(recipe: Recipe, speed: Speed) -> float:
    return speed.start + (_COMPILE if recipe.compile else 0.0)


def _finetuning(recipe: Recipe, speed: Speed) -> float:
    """Seconds of a run's fine-tuning: it compiles on its own, and is scored before and after."""
    if not recipe.finetune_steps:
        return 0.0
    tuning = recipe.finetuning()
    seconds = (tuning.steps * _operations(tuning) + _scoring(recipe)) / speed.operations
    return 2 * _start(recipe, speed) + seconds


def _scoring(recipe: Recipe) -> float:
    """Multiplications and additions of the scores at all lengths; of text, by two protocols."""
    count = recipe.eval_windows
    total = 0.0
    for length in recipe.eval_lens:
        tokens = recipe.of_task.tokens(length)
        if recipe.of_task.tied:  # text: the same stretches cut anew, and the same targets
            total += _forward(recipe, tokens, count * (recipe.longest // length))
        total += _forward(recipe, tokens, count)
    return total


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
