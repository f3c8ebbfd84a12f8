"""Text: predict the next byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from posenc.study import windows
from posenc.study.corpus import Corpus
from posenc.study.key_bytes import key_bytes
from posenc.study.tasks.task import Answer, Examples, Task

if TYPE_CHECKING:
    from posenc.study.recipe import Recipe

_BYTES = 256


@dataclass(frozen=True)
class Text(
    Task, kind="separating", answers="byte", tied=True,
    settings={
        "train_len": 64, "multiples": (1, 2, 4, 8, 16), "steps": 900, "batch_size": 16,
        "heads": 8, "learning_rate": 1.2e-2, "weight_decay": 0.1, "eval_windows": 32,
    },
):  # fmt: skip
    """The next byte of a text, at every byte: the loss is the score.

    Text of one's own is given to the study, ``--text FILE``.
    """

    corpus: Corpus | None = field(default=None, metadata={"option": False})

    @property
    def vocabulary(self) -> int:
        return _BYTES

    def tokens(self, size: int) -> int:
        return size

    def with_text(self, corpus: Corpus) -> Text:
        return replace(self, corpus=corpus)

    @property
    def digest(self) -> str:
        return self._text.sha256

    @property
    def _text(self) -> Corpus:
        if self.corpus is None:
            raise ValueError("corpus is None; a study's text is given by with_text(corpus)")
        return self.corpus

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        """Windows of the training text; a study has its own, see ``training``."""
        starts = rng.integers(0, len(self._text.train) - size, count)
        cut = windows.cut(self._text.train, starts, size)
        return Examples(cut[:, :-1], cut[:, 1:])

    def word(self, token: int) -> str:
        letter = chr(token)
        return letter if 32 < token < 127 else {" ": "␣"}.get(letter, repr(letter)[1:-1])

    def training(self, recipe: Recipe, seed: int, first: int, steps: int) -> Examples:
        starts = windows.training_starts(
            self._text.train, seed=seed, steps=recipe.steps, batch_size=recipe.batch_size,
            length=recipe.train_len,
        )  # fmt: skip
        cut = windows.cut(self._text.train, starts[first : first + steps], recipe.train_len)
        return Examples(cut[..., :-1], cut[..., 1:])

    def in_domain(self, recipe: Recipe, seed: int) -> None:
        """None: the loss of text is never solved."""

    def scores(self, recipe: Recipe, seed: int, answer: Answer, windowed: bool) -> dict[str, Any]:
        """Bits per byte at every length, under both protocols, by position, and of key bytes."""

        def bits(tokens: windows.Tokens, window: int | None) -> np.ndarray[Any, Any]:
            losses, _ = answer(tokens[:, :-1], tokens[:, 1:], window)
            return np.asarray(losses, dtype=np.float64) / math.log(2)

        stretches = windows.held_out_stretches(
            self._text.validation, count=recipe.eval_windows, longest=recipe.longest
        )
        return {
            **_losses(recipe, stretches, bits, windowed),
        }

    def check_validation(self, recipe: Recipe) -> None:
        self._between(recipe)

    def validation(self, recipe: Recipe, seed: int, answer: Answer) -> dict[str, Any]:
        """Bits per byte at the training length, between the stretches that are scored."""
        tokens = windows.non_overlapping(self._between(recipe), recipe.train_len)
        losses, _ = answer(tokens[:, :-1], tokens[:, 1:], None)
        return {"loss": float(np.asarray(losses, dtype=np.float64).mean() / math.log(2))}

    def _between(self, recipe: Recipe) -> windows.Tokens:
        return windows.between_stretches(
            self._text.validation, count=recipe.eval_windows, longest=recipe.longest,
            length=recipe.train_len,
        )  # fmt: skip


@dataclass(frozen=True)
class TokenText(Text, answers="token"):
    """Text in tokens of a file, with ids below ``size``."""

    size: int = field(default=0, metadata={"option": False})

    @property
    def vocabulary(self) -> int:
        return self.size

    def word(self, token: int) -> str:
        return str(token)


def _losses(
    recipe: Recipe,
    stretches: windows.Tokens,
    bits: Callable[[windows.Tokens, int | None], np.ndarray[Any, Any]],
    windowed: bool,
) -> dict[str, Any]:
    separate, same, inside, key, by_position = {}, {}, {}, {}, np.zeros(0)
    sliding: dict[str, float] = {}
    key_counts: dict[str, int] = {}
    by_stretch = {}
    last = max(1, min(recipe.eval_lens) // 2)
    for length in recipe.eval_lens:
        pieces = windows.non_overlapping(stretches, length)
        losses = ends = bits(pieces, None)
        separate[str(length)] = float(losses.mean())
        of_stretch = losses.reshape(len(stretches), -1).mean(axis=1)
        by_stretch[str(length)] = [round(float(loss), 5) for loss in of_stretch]
        by_position = losses.mean(axis=0)
        if length < recipe.longest:  # at the longest, both protocols score the same windows
            ends = bits(windows.same_targets(stretches, length), None)
        same[str(length)] = float(ends[:, -last:].mean())
        if windowed:
            inside[str(length)] = float(bits(pieces, recipe.train_len).mean())
        if recipe.stride:
            cut = windows.sliding(stretches, length, recipe.stride)
            losses_of = bits(cut.reshape(-1, length + 1), None).reshape(*cut.shape[:2], length)
            sliding[str(length)] = windows.sliding_mean(losses_of, recipe.stride)
        of_key = key_bytes(pieces, recipe.train_len)
        if of_key.any():
            key[str(length)] = float(losses[of_key].mean())
            key_counts[str(length)] = int(of_key.sum())
    bucket = max(1, recipe.train_len // 4)
    whole = len(by_position) // bucket * bucket
    return {
        "loss": separate,
        "loss_same_targets": same,
        "loss_key_bytes": key,
        "key_bytes": key_counts,
        "loss_windowed": inside or None,
        **({"loss_sliding": sliding} if sliding else {}),
        "loss_by_stretch": by_stretch,
        "loss_by_position": {
            "length": recipe.longest,
            "bucket": bucket,
            "loss": by_position[:whole].reshape(-1, bucket).mean(axis=1).tolist(),
        },
    }
