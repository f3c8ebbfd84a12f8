"""MQAR, multi-query associative recall: the values of keys that were given before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.study.tasks.assignments import lay_out, least_length, permutations
from posenc.study.tasks.task import NO_ANSWER, Examples, Task


@dataclass(frozen=True)
class MQAR(
    Task, kind="separating", solved_by="token_accuracy",
    paper="Arora et al. 2024, arXiv 2312.04927",
    settings={"train_len": 64, "steps": 300, "learning_rate": 4e-3, "batch_size": 32},
):  # fmt: skip
    """Pairs of key and value in noise; 40 % of later tokens ask for the value of a key.

    Parameters
    ----------
    pairs, keys, values
        Number of pairs, and of different keys and values.
    tokens_per_pair
        1: a pair is one token, and a question another one. 2: as published, with the value right
        after its key. A model then needs an induction head first, so it takes far longer.
    """

    pairs: Count = 12
    keys: Count = 16
    values: Count = 8
    tokens_per_pair: Count = 1

    def __post_init__(self) -> None:
        if self.pairs > self.keys:
            raise ValueError(f"pairs must be at most keys={self.keys}, got {self.pairs}")
        if self.tokens_per_pair > 2:
            raise ValueError(f"tokens_per_pair must be 1 or 2, got {self.tokens_per_pair}")

    @property
    def vocabulary(self) -> int:
        return 2 * self.keys + self.values + self.keys * self.values

    @property
    def least_size(self) -> int:
        return self.tokens_per_pair * least_length(self.pairs)

    @property
    def chance(self) -> float:
        return 1 / self.values

    def tokens(self, size: int) -> int:
        return size

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        places, asked, which = lay_out(rng, count, size // self.tokens_per_pair, self.pairs, 0.4)
        key = permutations(rng, count, self.keys, self.pairs)
        value = rng.integers(0, self.values, (count, self.pairs))
        questions, noise, pairs = self.values, self.values + self.keys, self.values + 2 * self.keys
        rows = np.arange(count)[:, None]
        tokens = rng.integers(noise, noise + self.keys, (count, size))
        labels = np.full_like(tokens, NO_ANSWER)
        if self.tokens_per_pair == 2:
            places, wide = 2 * places, np.zeros((count, size), bool)
            wide[:, ::2][:, : asked.shape[1]] = asked
            asked, which = wide, np.repeat(which, 2, axis=1)
            which = np.pad(which, ((0, 0), (0, size - which.shape[1])))
            tokens[rows, places], tokens[rows, places + 1] = questions + key, value
        else:
            tokens[rows, places] = pairs + key * self.values + value
        tokens = np.where(asked, questions + key[rows, which], tokens)
        return Examples(tokens, np.where(asked, value[rows, which], labels))

    def word(self, token: int) -> str:
        if token < self.values:
            return f"v{token}"
        kind, number = divmod(token - self.values, self.keys)
        if kind < 2:
            # As published, the key of a pair is also the question.
            return "." if kind else f"k{number}{'?' * (self.tokens_per_pair == 1)}"
        key, value = divmod(token - self.values - 2 * self.keys, self.values)
        return f"k{key}=v{value}"
