"""Last value: keys are written again and again, and the last value counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.study.tasks.assignments import permutations
from posenc.study.tasks.task import NO_ANSWER, Examples, Task


@dataclass(frozen=True)
class LastValue(
    Task, kind="separating", solved_by="token_accuracy", running=True, solved_at=0.95,
    paper="after Arora et al. 2024, arXiv 2312.04927",
    settings={"train_len": 64, "steps": 400, "learning_rate": 4e-3, "batch_size": 32},
):  # fmt: skip
    """Each token writes a value to a key, or asks for the value that a key was given last.

    Half of the tokens write. A key that was not written yet has no answer.

    Parameters
    ----------
    active, keys, values
        Number of keys in an example, of different keys, and of values.
    """

    active: Count = 8
    keys: Count = 16
    values: Count = 8

    def __post_init__(self) -> None:
        if self.active > self.keys:
            raise ValueError(f"active must be at most keys={self.keys}, got {self.active}")

    @property
    def vocabulary(self) -> int:
        return self.values + self.keys + self.keys * self.values

    @property
    def least_size(self) -> int:
        return 2

    @property
    def chance(self) -> float:
        return 1 / self.values

    def tokens(self, size: int) -> int:
        return size

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        pool = permutations(rng, count, self.keys, self.active)
        which = rng.integers(0, self.active, (count, size))
        value = rng.integers(0, self.values, (count, size))
        writes = rng.random((count, size)) < 0.5
        writes[:, 0], writes[:, -1] = True, False
        which[:, -1] = which[:, 0]  # so that each example has a question
        labels, rows = np.full((count, size), NO_ANSWER), np.arange(count)
        now = np.full((count, self.active), NO_ANSWER)
        for t in range(size):
            key, write = which[:, t], writes[:, t]
            labels[:, t] = np.where(write, NO_ANSWER, now[rows, key])
            now[rows, key] = np.where(write, value[:, t], now[rows, key])
        key = np.take_along_axis(pool, which, axis=1)
        pair = self.values + self.keys + key * self.values + value
        return Examples(np.where(writes, pair, self.values + key), labels)

    def word(self, token: int) -> str:
        if token < self.values:
            return f"v{token}"
        if token < self.values + self.keys:
            return f"k{token - self.values}?"
        key, value = divmod(token - self.values - self.keys, self.values)
        return f"k{key}=v{value}"
