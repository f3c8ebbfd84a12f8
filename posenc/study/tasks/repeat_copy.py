"""Repeat copy: repeat symbols that occur many times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.study.tasks.prompts import Prompt
from posenc.study.tasks.task import Integers


@dataclass(frozen=True)
class RepeatCopy(
    Prompt, kind="must fail", varied=True, score="exact_match",
    paper="Zhou et al. 2023, arXiv 2310.16028",
    settings={"train_len": 16, "steps": 800},
):  # fmt: skip
    """Answer with the symbols of the prompt, in their order; of two symbols by default.

    No stretch of the answer says where it stands in the prompt, so a model has to count beyond what
    it has seen. With more symbols, short stretches are unique, and the task is a copy.
    """

    symbols: Count = 2

    def prompts(self, rng: np.random.Generator, size: int, count: int) -> Integers:
        return rng.integers(0, self.symbols, (count, size))

    def check_size(self, size: int) -> None:
        super(Prompt, self).check_size(size)

    @property
    def chance(self) -> float:
        return 0.0

    def answer(self, x: Integers) -> Integers:
        return x

    def must_fail(self, scheme: PositionScheme) -> bool:
        return self.symbols <= 2
