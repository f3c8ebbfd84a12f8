"""Examples of a task for training, and for tests at every length."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from posenc.study.tasks.examples import NO_ANSWER, Answer, Examples, Integers

if TYPE_CHECKING:
    from posenc.study.recipe import Recipe
    from posenc.study.tasks.task import Task

_TRAINING, _IN_DOMAIN, _TESTS, _VALIDATION = 4, 5, 6, 8  # streams of a seed; windows.py has others


def batches(task: Task, recipe: Recipe, seed: int, first: int, steps: int) -> Examples:
    """Batches ``(steps, batch_size, T)`` of the steps from ``first``."""
    rng = np.random.default_rng([seed, _TRAINING, first])
    drawn = _of_training(task, recipe, rng, steps * recipe.batch_size)
    shape = steps, recipe.batch_size, -1
    return Examples(drawn.tokens.reshape(shape), drawn.labels.reshape(shape))


def in_domain(task: Task, recipe: Recipe, seed: int) -> Examples:
    """``eval_windows`` examples like those of training."""
    rng = np.random.default_rng([seed, _IN_DOMAIN])
    return _of_training(task, recipe, rng, recipe.eval_windows)


def scores(task: Task, recipe: Recipe, seed: int, answer: Answer) -> dict[str, Any]:
    """Scores of ``eval_windows`` examples of each test and length: the same for every scheme."""
    return {
        "scores": {
            name: {str(size): _score(test, recipe, seed, size, answer) for size in recipe.eval_lens}
            for name, test in task.tests().items()
        }
    }


def validation(task: Task, recipe: Recipe, seed: int, answer: Answer) -> dict[str, Any]:
    """The loss in bits per answer, and scores, of ``eval_windows`` examples of training sizes."""
    rng = np.random.default_rng([seed, _VALIDATION])
    drawn = _of_training(task, recipe, rng, recipe.eval_windows)
    losses, right = answer(drawn.tokens, drawn.labels, None)
    found = summarise(drawn.labels, np.asarray(right))
    bits = _bits(losses)[drawn.labels >= 0]
    scores = {name: found[name] for name in ("token_accuracy", "exact_match")}
    return {"loss": float(bits.mean()), **scores}


def summarise(labels: Integers, right: Integers) -> dict[str, Any]:
    """Token accuracy and exact match, and answers by example; no answer is a NaN."""
    asked = labels >= 0
    right = right & asked
    per_example = asked.sum(axis=1)
    some = per_example > 0
    exact = right.sum(axis=1)[some] == per_example[some]
    return {
        "examples": int(some.sum()),
        "token_accuracy": float(right.sum() / asked.sum()) if some.any() else None,
        "exact_match": float(exact.mean()) if some.any() else None,
        "right": right.sum(axis=1)[some].tolist(),
        "asked": per_example[some].tolist(),
    }


def _of_training(task: Task, recipe: Recipe, rng: np.random.Generator, count: int) -> Examples:
    """Examples of training sizes; shorter ones end in tokens 0 without answers."""
    longest = recipe.train_len
    if not task.varied:
        return task.draw(rng, longest, count)
    sizes = rng.integers(task.least_size, longest + 1, count)
    shape = count, task.tokens(longest)
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, NO_ANSWER)
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        drawn = task.draw(rng, int(size), len(rows))
        width = drawn.tokens.shape[1]
        tokens[rows, :width], labels[rows, :width] = drawn.tokens, drawn.labels
    return Examples(tokens, labels)


def _score(test: Task, recipe: Recipe, seed: int, size: int, answer: Answer) -> dict[str, Any]:
    rng = np.random.default_rng([seed, _TESTS, size])
    drawn = test.draw(rng, size, recipe.eval_windows)
    labels = np.array(drawn.labels)
    if test.running and size > recipe.train_len:
        labels[:, : test.tokens(recipe.train_len)] = NO_ANSWER
    losses, right = answer(drawn.tokens, labels, None)
    found = summarise(labels, np.asarray(right))
    bits, asked = _bits(losses), labels >= 0
    found["loss"] = float(bits[asked].mean()) if asked.any() else None
    if test.score == "loss":
        of_example = np.where(asked, bits, 0).sum(axis=1)[asked.any(axis=1)]
        found["bits"] = [round(float(one), 5) for one in of_example]
    if drawn.groups is None:
        return found
    groups = np.asarray(drawn.groups)
    pairs = [(asked & right & (groups == n), asked & (groups == n)) for n in _numbers(test)]
    return {**found, "groups": [[int(a.sum()), int(b.sum())] for a, b in pairs]}


def _bits(losses: Integers) -> Integers:
    return np.asarray(losses, dtype=np.float64) / math.log(2)


def _numbers(test: Task) -> range:
    return range(len(test.group_names()))
