"""Association: facts and questions that share no symbol, as in NoLiMa."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.study.tasks.assignments import lay_out, least_length, permutations
from posenc.study.tasks.task import NO_ANSWER, Examples, Task


@dataclass(frozen=True)
class Association(
    Task, kind="separating", solved_by="token_accuracy",
    paper="Modarressi et al. 2025, arXiv 2502.05167",
    settings={"train_len": 64, "steps": 300, "learning_rate": 4e-3, "batch_size": 32},
):  # fmt: skip
    """Facts "person has value" in noise; a question names the town of a person.

    Who lives where is the same in all examples: training has to learn it. The persons of an example
    are of different towns, so a question has one answer. No symbol of it occurs in the fact, so
    there is no literal match to look for.

    Parameters
    ----------
    facts, towns
        Number of facts in an example, and of towns.
    persons_per_town, values
        Number of persons of each town, and of values.
    """

    facts: Count = 6
    towns: Count = 8
    persons_per_town: Count = 3
    values: Count = 8

    def __post_init__(self) -> None:
        if self.facts > self.towns:
            raise ValueError(f"facts must be at most towns={self.towns}, got {self.facts}")

    @property
    def vocabulary(self) -> int:
        return self.values + 2 * self.towns + self._persons * self.values

    @property
    def _persons(self) -> int:
        return self.towns * self.persons_per_town

    @property
    def least_size(self) -> int:
        return least_length(self.facts)

    @property
    def chance(self) -> float:
        return 1 / self.values

    def tokens(self, size: int) -> int:
        return size

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        places, asked, which = lay_out(rng, count, size, self.facts, 0.3)
        town = permutations(rng, count, self.towns, self.facts)
        person = town + self.towns * rng.integers(0, self.persons_per_town, town.shape)
        value = np.asarray(rng.integers(0, self.values, town.shape))
        noise, questions = self.values, self.values + self.towns
        rows = np.arange(count)[:, None]
        tokens = rng.integers(noise, noise + self.towns, (count, size))
        tokens[rows, places] = questions + self.towns + person * self.values + value
        tokens = np.where(asked, questions + town[rows, which], tokens)
        return Examples(tokens, np.where(asked, value[rows, which], NO_ANSWER))

    def word(self, token: int) -> str:
        if token < self.values:
            return f"v{token}"
        kind, number = divmod(token - self.values, self.towns)
        if kind < 2:
            return "." if kind == 0 else f"town{number}?"
        person, value = divmod(token - self.values - 2 * self.towns, self.values)
        return f"p{person}=v{value}"
