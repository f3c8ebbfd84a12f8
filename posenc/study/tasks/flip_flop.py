"""Flip-flop: the bit that was written last, however much stands in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from posenc.contract.fields import Positive
from posenc.study.tasks.task import NO_ANSWER, Examples, Task

_WRITE, _IGNORE, _READ, _BITS = 0, 1, 2, 3


@dataclass(frozen=True)
class FlipFlop(
    Task, kind="separating", solved_by="token_accuracy", running=True,
    paper="Liu et al. 2023, arXiv 2306.00946",
    settings={"train_len": 128, "steps": 400, "batch_size": 16, "eval_windows": 512},
):  # fmt: skip
    """Instruction and bit in turn: write a bit, ignore one, or read the bit written last.

    Tested as in training, and with sparse and dense writes: 98 and 10 % of instructions ignored.

    Parameters
    ----------
    ignore
        Share of instructions that are to be ignored; the others write and read in equal parts.
    """

    ignore: Positive = 0.8

    def __post_init__(self) -> None:
        if self.ignore >= 1:
            raise ValueError(f"ignore must be below 1, got {self.ignore}")

    @property
    def vocabulary(self) -> int:
        return _BITS + 2

    @property
    def least_size(self) -> int:
        return 4

    @property
    def chance(self) -> float:
        return 0.5

    def tokens(self, size: int) -> int:
        return size

    def check_size(self, size: int) -> None:
        super().check_size(size)
        if size % 2:
            raise ValueError(f"sizes must be even, instruction and bit in turn, got {size}")

    def tests(self) -> Mapping[str, Task]:
        return {"": self, "sparse": replace(self, ignore=0.98), "dense": replace(self, ignore=0.1)}

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        items, other = size // 2, (1 - self.ignore) / 2
        what = rng.choice(3, size=(count, items), p=[other, self.ignore, other])
        what[:, 0], what[:, -1] = _WRITE, _READ
        bits = rng.integers(0, 2, (count, items))
        written = np.where(what == _WRITE, np.arange(items), 0)
        last = np.maximum.accumulate(written, axis=1)
        state = np.take_along_axis(bits, last, axis=1)
        read = what == _READ
        bits = np.where(read, state, bits)
        tokens = np.stack([what, _BITS + bits], axis=2).reshape(count, size)
        answers = np.where(read, _BITS + state, NO_ANSWER)
        labels = np.stack([answers, np.full_like(answers, NO_ANSWER)], axis=2)
        return Examples(tokens, labels.reshape(count, size))

    def word(self, token: int) -> str:
        return ("write", "ignore", "read", "0", "1")[token]
