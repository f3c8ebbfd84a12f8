"""State tracking: products of permutations, along the way."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.study.tasks.task import NO_ANSWER, Examples, Task


@dataclass(frozen=True)
class StateTracking(
    Task, kind="separating", solved_by="token_accuracy", running=True,
    paper="Merrill et al. 2024, arXiv 2404.08819",
    settings={"train_len": 16, "steps": 800, "batch_size": 64},
):  # fmt: skip
    """Permutations of ``n`` things; at each, the product of all so far.

    The group is S2, the running parity, or S3. The first token is always the same: a scheme that
    sums along the way measures from it.

    Parameters
    ----------
    things
        ``n``: 2 or 3.
    """

    things: Count = 2

    def __post_init__(self) -> None:
        if self.things not in (2, 3):
            raise ValueError(f"things must be 2 or 3, got {self.things}")

    @property
    def vocabulary(self) -> int:
        return 1 + len(self._elements)

    @property
    def _elements(self) -> list[tuple[int, ...]]:
        return list(itertools.permutations(range(self.things)))

    @property
    def chance(self) -> float:
        return 1 / len(self._elements)

    def tokens(self, size: int) -> int:
        return size + 1

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        elements = self._elements
        number = {element: n for n, element in enumerate(elements)}
        product = np.array([[number[tuple(a[i] for i in b)] for b in elements] for a in elements])
        steps = rng.integers(0, len(elements), (count, size))
        states = np.empty_like(steps)
        state = np.zeros(count, steps.dtype)  # the identity
        for t in range(size):
            state = states[:, t] = product[state, steps[:, t]]
        first = np.zeros((count, 1), steps.dtype)
        return Examples(np.hstack([first, 1 + steps]), np.hstack([first + NO_ANSWER, 1 + states]))

    def word(self, token: int) -> str:
        return "#" if token == 0 else "".join(map(str, self._elements[token - 1]))
