"""What is wrong with a result: known wrong definitions, tried one after the other.

A ``Hypothesis`` is one known fault, with the values that it would give. ``explain`` returns the
sentence of the first whose values the candidate returned, and else what it can measure.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from posenc.audit.gold import Question, answer
from posenc.testing.framework import Host

Guess: TypeAlias = "tuple[str, Question | Host]"
NEARLY = 0.05
"""A fault of half precision also explains a result if it leaves this part of the difference: angles
are rounded in more than one way."""


@dataclass(frozen=True)
class Hypothesis:
    """One known fault.

    Attributes
    ----------
    name
        What it is called in the documentation.
    kinds
        Which kinds of functions can have it.
    guesses
        Gives, for a question, a sentence and what the fault would answer: its values, or another
        question whose right answer these are. None where the fault cannot be.
    rounds
        Whether it is a rounding, which may be done in more than one way.
    """

    name: str
    kinds: tuple[str, ...]
    guesses: Callable[[Question], Iterable[Guess]]
    rounds: bool = False


def hypotheses() -> list[Hypothesis]:
    """Every known fault, the most common ones first."""
    from posenc.audit.hypotheses import EVERY  # it needs ``Hypothesis``

    return list(EVERY)


def guessed(question: Question) -> Iterator[tuple[str, Host, bool]]:
    """The sentence and the values of every guess at a question, and whether it is a rounding."""
    for hypothesis in hypotheses():
        if question.kind in hypothesis.kinds:
            try:
                for sentence, guess in hypothesis.guesses(question):
                    values = _values(guess)
                    if values is not None:
                        yield sentence, values, hypothesis.rounds
            except ValueError:  # the fault needs sizes that the scheme does not have
                continue


def _values(guess: Question | Host) -> Host | None:
    """What a guess answers; None if the scheme cannot have the fault at its sizes."""
    try:
        return answer(guess) if isinstance(guess, Question) else guess
    except (ValueError, TypeError, NotImplementedError):
        return None


def explain(question: Question, found: Host, gold: Host, tolerance: Host, compared: Host) -> str:
    """In a sentence, what is wrong with ``found``."""
    finite = bool(np.all(np.isfinite(found[compared & np.isfinite(gold)])))
    nearest: tuple[float, str] = (NEARLY, "")
    off = _size((found - gold)[compared & np.isfinite(gold)])
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for sentence, values, rounds in guessed(question):
            if values.shape != gold.shape:
                continue
            compare = compared & ~np.isnan(values)
            if not np.any((np.abs(values - gold) > tolerance) & compared):
                continue  # here the fault changes nothing
            rest = np.where(found == values, 0.0, np.abs(found - values))  # infinite ones, too
            if np.any(compare) and np.all(rest[compare] <= tolerance[compare]):
                return sentence
            if rounds and finite and _size(rest[compare]) < nearest[0] * off:
                nearest = (_size(rest[compare]) / off, sentence)
    if not finite:
        return _not_finite(question, found, gold, compared)
    return nearest[1] or measured(question, found, gold, tolerance, compared)


def measured(question: Question, found: Host, gold: Host, tolerance: Host, compared: Host) -> str:
    """What can be said of a result that no known fault explains."""
    from posenc.audit.hypotheses import measures

    for measure in measures():
        sentence = measure(question, found, gold, tolerance, compared)
        if sentence:
            return sentence
    return "No known fault explains it."


def _size(difference: Host) -> float:
    return float(np.sqrt(np.mean(np.square(difference)))) if difference.size else 0.0


def _not_finite(question: Question, found: Host, gold: Host, compared: Host) -> str:
    bad = ~np.isfinite(found) & np.isfinite(gold) & compared
    kind = "NaN" if np.any(np.isnan(found[bad])) else "infinite"
    where: Any = np.argwhere(bad)
    return f"{len(where)} numbers are {kind}, where the definition is finite."
