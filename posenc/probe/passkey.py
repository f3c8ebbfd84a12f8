"""Prompts that hide a key at a depth and ask for it at the end: in words, or in any tokens.

In words, after Mohtashami and Jaggi 2023, arXiv 2305.16300: a line with a number of five digits
stands among lines without a meaning, and the end of the prompt asks for it. Without a tokenizer,
as the task ``passkey`` of ``posenc compare``: in noise, a mark is followed by a key of two tokens,
and a mark at the end asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from posenc.study.tasks.examples import NO_ANSWER

Array = np.ndarray[Any, Any]
_HEAD = "One of the lines below names the pass key. Keep it in mind, you will be asked for it.\n"
_FILLER = "The hills are far away. Rain falls on the roof. A boat goes down the river.\n"
_NEEDLE = "The pass key is {}. Remember: {} is the pass key.\n"
_QUESTION = "What was the pass key? The pass key is"
_DIGITS = 5
_LEAST = 64  # tokens of noise from which symbols are drawn, at most


class Source(Protocol):
    """What draws prompts."""

    @property
    def about(self) -> str:
        """What the prompts are made of, for the report and for digests."""
        ...

    @property
    def chance(self) -> float:
        """How often a guess is right."""
        ...

    def draw(self, rng: np.random.Generator, length: int, depth: float) -> tuple[Array, Array]:
        """Tokens and labels ``(length,)``; ``ValueError`` if the length has no room."""
        ...


@dataclass(frozen=True)
class Words:
    """Prompts in words; ``encode`` turns text into ids, and ``start`` comes first, if not None."""

    encode: Callable[[str], Sequence[int]]
    start: int | None = None

    @property
    def about(self) -> str:
        return f"a line with a number of {_DIGITS} digits among lines without a meaning"

    @property
    def chance(self) -> float:
        return 10.0**-_DIGITS

    def draw(self, rng: np.random.Generator, length: int, depth: float) -> tuple[Array, Array]:
        key = str(rng.integers(10 ** (_DIGITS - 1), 10**_DIGITS))
        head = [*([] if self.start is None else [self.start]), *self.encode(_HEAD)]
        line, needle = list(self.encode(_FILLER)), list(self.encode(_NEEDLE.format(key, key)))
        whole, stem = list(self.encode(f"{_QUESTION} {key}")), list(self.encode(_QUESTION))
        same = 0  # a tokenizer may join the end of the question with the key
        while same < len(stem) and whole[same] == stem[same]:
            same += 1
        asked = whole[same:]
        room = length + 1 - len(head) - len(needle) - len(whole)
        if room < 0:
            raise ValueError(f"a prompt needs {length - room} tokens, more than {length}")
        before = round(depth * room / len(line)) * len(line)  # whole lines before the key's
        before = min(before, room)
        filler = (line * (room // len(line) + 1))[:room]
        tokens = np.array([*head, *filler[:before], *needle, *filler[before:], *whole[:-1]])
        labels = np.full(length, NO_ANSWER)
        labels[-len(asked) :] = asked
        return tokens, labels


@dataclass(frozen=True)
class Symbols:
    """Prompts of the given ids: noise and keys are drawn from all but the first, the mark."""

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ids) < 3:
            raise ValueError(f"ids of a passkey must be at least 3, got {len(self.ids)}")

    @classmethod
    def of(cls, tokens: Array) -> Symbols:
        """Up to 65 of the ids of a text, evenly spread over them."""
        found = np.unique(np.asarray(tokens[: 1 << 20]))
        chosen = np.linspace(0, len(found) - 1, min(len(found), _LEAST + 1)).astype(np.int64)
        return cls(tuple(int(one) for one in found[np.unique(chosen)]))

    @property
    def about(self) -> str:
        return f"a mark and a key of two tokens in noise, of {len(self.ids) - 1} random tokens"

    @property
    def chance(self) -> float:
        return float(len(self.ids) - 1) ** -2

    def draw(self, rng: np.random.Generator, length: int, depth: float) -> tuple[Array, Array]:
        if length < 6:
            raise ValueError(f"a prompt needs 6 tokens, more than {length}")
        mark, *others = self.ids
        tokens, key = rng.choice(others, length), rng.choice(others, 2)
        start = round(depth * (length - 5))
        tokens[start : start + 3] = mark, *key
        tokens[-2:] = mark, key[0]
        labels = np.full(length, NO_ANSWER)
        labels[-2:] = key
        return tokens, labels


def prompts(source: Source, length: int, depths: int, keys: int, seed: int) -> tuple[Array, Array]:
    """Tokens and labels ``(depths * keys, length)``, ``keys`` for each depth from 0 to 1."""
    rng = np.random.default_rng([seed, length])
    places = np.linspace(0, 1, depths) if depths > 1 else np.array([0.5])
    drawn = [source.draw(rng, length, float(at)) for at in places for _ in range(keys)]
    return np.stack([tokens for tokens, _ in drawn]), np.stack([labels for _, labels in drawn])
