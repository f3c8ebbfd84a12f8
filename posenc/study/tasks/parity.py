"""Parity of a string of bits, asked at its end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.apply.feature_needs import has_features
from posenc.contract.protocol import Hook, PositionScheme
from posenc.study.tasks.task import NO_ANSWER, Examples, Task


@dataclass(frozen=True)
class Parity(
    Task, kind="must fail", varied=True, score="exact_match",
    paper="Hahn 2020, arXiv 1906.06755",
    settings={"train_len": 16, "steps": 600, "batch_size": 64},
):  # fmt: skip
    """Bits, then a question: whether the number of ones is odd.

    A fixed encoding cannot solve it beyond the training length. A scheme that reads the content of
    tokens may.
    """

    @property
    def vocabulary(self) -> int:
        return 4

    @property
    def chance(self) -> float:
        return 0.5

    def tokens(self, size: int) -> int:
        return size + 2

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        bits = rng.integers(0, 2, (count, size))
        ends = np.zeros((count, 1), bits.dtype)
        labels = np.full((count, size + 2), NO_ANSWER)
        labels[:, -1] = bits.sum(axis=1) % 2
        return Examples(np.hstack([ends + 2, bits, ends + 3]), labels)

    def must_fail(self, scheme: PositionScheme) -> bool:
        return not has_features(scheme) and Hook.ADJUST_SCORES not in scheme.hooks()

    def word(self, token: int) -> str:
        return ("0", "1", "#", "?")[token]
