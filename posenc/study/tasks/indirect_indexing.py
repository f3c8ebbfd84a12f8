"""Indirect indexing: the character at an offset from another one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.study.tasks.assignments import permutations
from posenc.study.tasks.task import NO_ANSWER, Examples, Task


@dataclass(frozen=True)
class IndirectIndexing(
    Task, kind="separating", solved_by="token_accuracy",
    paper="Gopalakrishnan et al. 2025, arXiv 2509.10534",
    settings={"train_len": 8, "multiples": (1, 2), "steps": 1500},
):  # fmt: skip
    """A text of different characters, then questions: what stands ``s`` places after ``c``.

    A question is one token for ``c`` and ``s``. Shift 0 is left out: its answer is in the question.
    An example of size ``n`` has a text of ``n`` characters and ``2n`` questions.

    Parameters
    ----------
    characters
        Number of different characters.
    shift
        The largest distance ``|s|``.
    """

    characters: Count = 16
    shift: Count = 2

    @property
    def _shifts(self) -> int:
        return 2 * self.shift

    @property
    def vocabulary(self) -> int:
        return self.characters * (1 + self._shifts)

    @property
    def least_size(self) -> int:
        return self.shift + 1

    @property
    def chance(self) -> float:
        return 1 / self.characters

    def tokens(self, size: int) -> int:
        return 3 * size

    def check_size(self, size: int) -> None:
        super().check_size(size)
        if size > self.characters:
            raise ValueError(
                f"characters must be at least {size}, as many as a text has, got {self.characters}"
            )

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        text, rows = permutations(rng, count, self.characters, size), np.arange(count)[:, None]
        number = rng.integers(0, self._shifts, (count, 2 * size))
        by = number - self.shift + (number >= self.shift)
        at = rng.integers(np.maximum(0, -by), np.minimum(size, size - by))
        questions = self.characters + self._shifts * text[rows, at] + number
        nothing = np.full_like(text, NO_ANSWER)
        return Examples(np.hstack([text, questions]), np.hstack([nothing, text[rows, at + by]]))

    def word(self, token: int) -> str:
        if token < self.characters:
            return f"c{token}"
        character, number = divmod(token - self.characters, self._shifts)
        by = number - self.shift + (number >= self.shift)
        return f"c{character}{by:+d}?"
