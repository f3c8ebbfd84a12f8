"""Frequent words: the word seen most often so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.study.tasks.task import NO_ANSWER, Examples, Integers, Task


@dataclass(frozen=True)
class FrequentWords(
    Task, kind="separating", solved_by="token_accuracy", running=True, solved_at=0.97,
    paper="after Hsieh et al. 2024, arXiv 2404.06654",
    settings={"train_len": 64, "steps": 300, "learning_rate": 4e-3, "batch_size": 32},
):  # fmt: skip
    """Words at random; every eighth token asks for the word that came most often before it.

    No word is planted, so a model has to count exactly. Where two words are first, there is no
    answer; only before the last question, another word follows and is then first alone.

    Parameters
    ----------
    words
        Number of different words.
    """

    words: Count = 16

    def __post_init__(self) -> None:
        if self.words < 2:
            raise ValueError(f"words must be at least 2, got {self.words}")

    @property
    def vocabulary(self) -> int:
        return self.words + 1

    @property
    def least_size(self) -> int:
        return 8

    @property
    def chance(self) -> float:
        return 1 / self.words

    def tokens(self, size: int) -> int:
        return size

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        words = rng.integers(0, self.words, (count, size))
        asked = np.arange(size) % 8 == 7
        seen = np.zeros((count, self.words), np.int64)
        labels, rows = np.full((count, size), NO_ANSWER), np.arange(count)
        last = size // 8 * 8 - 1
        for t in range(size):
            if not asked[t]:
                seen[rows, words[:, t]] += 1
                continue
            tied = _tied(seen)
            if t == last:  # each example has an answer
                seen[tied, words[tied, t - 1]] -= 1
                words[tied, t - 1] = seen[tied].argmax(axis=1)
                seen[tied, words[tied, t - 1]] += 1
                tied = _tied(seen)
            labels[:, t] = np.where(tied, NO_ANSWER, seen.argmax(axis=1))
        return Examples(np.where(asked, self.words, words), labels)

    def word(self, token: int) -> str:
        return "most?" if token == self.words else f"w{token}"


def _tied(seen: Integers) -> Integers:
    """Whether two words are first, of counts ``(N, words)``."""
    second, first = np.sort(seen, axis=1)[:, -2:].T
    return np.asarray(first == second)
