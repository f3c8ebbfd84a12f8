"""Passkey: find a key that stands somewhere in noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.study.tasks.task import NO_ANSWER, Examples, Task

_MARK, _FIRST = 0, 1
_DEPTHS = 10


@dataclass(frozen=True)
class Passkey(
    Task, kind="separating", varied=True, score="exact_match", groups="depth",
    paper="Mohtashami and Jaggi 2023, arXiv 2305.16300",
    settings={"train_len": 32, "steps": 600},
):  # fmt: skip
    """In ``n`` tokens of noise, a mark is followed by a key of two symbols; a mark at the end asks.

    The place of the key is uniform. Groups are its depth, in tenths of the noise.

    Parameters
    ----------
    symbols
        Number of symbols of the noise, and of keys.
    shared
        False: keys have symbols of their own, so a model may look for their kind. True: keys and
        noise have the same symbols, so a model must look for what follows the mark. The two forms
        rank schemes differently.
    """

    symbols: Count = 16
    shared: bool = False

    @property
    def vocabulary(self) -> int:
        return _FIRST + self.symbols * (1 if self.shared else 2)

    @property
    def least_size(self) -> int:
        return 4

    @property
    def chance(self) -> float:
        return self.symbols**-2

    def tokens(self, size: int) -> int:
        return size + 2

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        self.check_size(size)
        first = _FIRST if self.shared else _FIRST + self.symbols
        tokens = rng.integers(_FIRST, _FIRST + self.symbols, (count, size + 2))
        key = rng.integers(first, first + self.symbols, (count, 2))
        start, rows = rng.integers(0, size - 2, count), np.arange(count)
        tokens[rows, start] = tokens[:, size] = _MARK
        for n in range(2):
            tokens[rows, start + 1 + n] = key[:, n]
        tokens[:, size + 1] = key[:, 0]
        labels = np.full_like(tokens, NO_ANSWER)
        labels[:, size:] = key
        depth = start * _DEPTHS // (size - 2)
        return Examples(tokens, labels, np.broadcast_to(depth[:, None], tokens.shape))

    def group_names(self) -> tuple[str, ...]:
        return tuple(f"{100 * n // _DEPTHS}–{100 * (n + 1) // _DEPTHS} %" for n in range(_DEPTHS))

    def word(self, token: int) -> str:
        if token == _MARK:
            return "?"
        kind, number = divmod(token - _FIRST, self.symbols)
        return f"{'ak'[kind]}{number}"
