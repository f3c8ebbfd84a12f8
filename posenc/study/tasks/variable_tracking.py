"""Variable tracking: assignments of constants and of other variables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.study.tasks.assignments import lay_out, least_length, permutations
from posenc.study.tasks.task import NO_ANSWER, Examples, Task


@dataclass(frozen=True)
class VariableTracking(
    Task, kind="separating", solved_by="token_accuracy", groups="links",
    paper="Hsieh et al. 2024, arXiv 2404.06654",
    settings={"train_len": 64, "steps": 800, "learning_rate": 4e-3, "batch_size": 32, "layers": 3},
):  # fmt: skip
    """``x = 3`` or ``y = x``, one token each, in noise; a question asks for a variable's constant.

    After the first, three of four assignments pick an earlier variable, and copy it unless its
    chain is full. Groups are the links from a variable to its constant, at most ``links``; each is
    as hard as an attention layer.

    Parameters
    ----------
    variables, names, values
        Number of variables in an example, of different names, and of constants.
    links
        The longest chain.
    """

    variables: Count = 12
    names: Count = 16
    values: Count = 8
    links: Count = 2

    def __post_init__(self) -> None:
        if self.variables > self.names:
            raise ValueError(f"variables must be at most names={self.names}, got {self.variables}")

    @property
    def _wide(self) -> int:
        """What may stand right of the sign: a constant or a name."""
        return self.values + self.names

    @property
    def vocabulary(self) -> int:
        return self.values + 2 * self.names + self.names * self._wide

    @property
    def least_size(self) -> int:
        return least_length(self.variables)

    @property
    def chance(self) -> float:
        return 1 / self.values

    def tokens(self, size: int) -> int:
        return size

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        places, asked, which = lay_out(rng, count, size, self.variables, 0.4)
        name = permutations(rng, count, self.names, self.variables)
        constant = np.asarray(rng.integers(0, self.values, name.shape))
        chain, right = np.zeros_like(name), np.array(constant)
        at, rows = np.arange(count), np.arange(count)[:, None]
        for n in range(1, self.variables):
            old = rng.integers(0, n, count)
            copies = (rng.random(count) < 0.75) & (chain[at, old] < self.links)
            right[:, n] = np.where(copies, self.values + name[at, old], constant[:, n])
            constant[:, n] = np.where(copies, constant[at, old], constant[:, n])
            chain[:, n] = np.where(copies, chain[at, old] + 1, 0)
        questions, noise = self.values, self.values + self.names
        tokens = rng.integers(noise, noise + self.names, (count, size))
        tokens[rows, places] = noise + self.names + name * self._wide + right
        tokens = np.where(asked, questions + name[rows, which], tokens)
        labels = np.where(asked, constant[rows, which], NO_ANSWER)
        return Examples(tokens, labels, chain[rows, which])

    def group_names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.links + 1)))

    def word(self, token: int) -> str:
        if token < self.values:
            return str(token)
        kind, number = divmod(token - self.values, self.names)
        if kind < 2:
            return f"x{number}?" if kind == 0 else "."
        name, right = divmod(token - self.values - 2 * self.names, self._wide)
        return f"x{name}={right if right < self.values else f'x{right - self.values}'}"
