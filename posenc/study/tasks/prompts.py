"""Prompts with an answer of as many symbols: ``BOS x SEP y EOS``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.checks import check_count
from posenc.contract.fields import Count
from posenc.study.tasks.task import NO_ANSWER, Examples, Integers, Task

_END, _SEPARATOR, _FIRST = 0, 1, 2


@dataclass(frozen=True)
class Prompt(Task):
    """Base of tasks whose answer is made of the symbols of the prompt.

    An example of size ``n`` reads ``BOS x_1 .. x_n SEP y_1 .. y_n``; the answers are ``y_1`` at
    ``SEP``, and so on to ``EOS`` at ``y_n``. ``BOS`` and ``EOS`` are one token.

    Parameters
    ----------
    symbols
        Number of different symbols.
    """

    symbols: Count = 80

    @property
    def vocabulary(self) -> int:
        return self.symbols + _FIRST

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def tokens(self, size: int) -> int:
        return 2 * size + 2

    def answer(self, x: Integers) -> Integers:
        """The answers ``y`` to the prompts ``x``, both ``(N, n)``."""
        raise NotImplementedError

    def prompts(self, rng: np.random.Generator, size: int, count: int) -> Integers:
        """Prompts ``x (N, n)``: here of different symbols, in an order that is random."""
        order = rng.random((count, self.symbols))
        return np.argsort(order, axis=1)[:, :size]

    def check_size(self, size: int) -> None:
        super().check_size(size)
        if size > self.symbols:
            raise ValueError(
                f"symbols must be at least {size}, as many as an example has, got {self.symbols}"
            )

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(check_count("size", size))
        x = self.prompts(rng, size, count)
        y = self.answer(x)
        ends = np.full((count, 1), _END)
        tokens = np.hstack([ends, x + _FIRST, ends + _SEPARATOR, y + _FIRST])
        nothing = np.full((count, size + 1), NO_ANSWER)
        return Examples(tokens, np.hstack([nothing, y + _FIRST, ends]))

    def word(self, token: int) -> str:
        return {_END: "#", _SEPARATOR: ":"}.get(token) or str(token - _FIRST)
