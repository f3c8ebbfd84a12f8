"""Majority: whether there are more ones than zeros so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.study.tasks.task import NO_ANSWER, Examples, Task


@dataclass(frozen=True)
class Majority(
    Task, kind="sanity", solved_by="token_accuracy", running=True, solved_at=0.97,
    paper="Pérez et al. 2021, JMLR 22(75)",
    settings={"train_len": 16, "steps": 400, "batch_size": 64},
):  # fmt: skip
    """Bits; at each, whether the ones or the zeros are ahead, or neither.

    The share of ones differs between examples: long strings of fair bits would all be near ties.
    """

    @property
    def vocabulary(self) -> int:
        return 6

    @property
    def chance(self) -> float:
        return 0.5

    def tokens(self, size: int) -> int:
        return size + 1

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        bits = (rng.random((count, size)) < rng.random((count, 1))).astype(np.int64)
        ahead = np.sign(np.cumsum(2 * bits - 1, axis=1))
        first = np.zeros((count, 1), bits.dtype)
        return Examples(np.hstack([first, 1 + bits]), np.hstack([first + NO_ANSWER, 4 + ahead]))

    def word(self, token: int) -> str:
        return ("#", "0", "1", "zeros", "tie", "ones")[token]
