"""Where a result differs from the gold: the first place, and how far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from posenc.audit.gold import Question
from posenc.testing.framework import Host


@dataclass(frozen=True)
class Difference:
    """Where and how far a result is from the gold."""

    error: float
    tolerance: float
    wrong: Host
    where: Mapping[str, int]
    found: float
    expected: float


def compare(question: Question, found: Host, gold: Host, tolerance: Host) -> Difference:
    """Where numbers differ by more than the tolerance; ``where`` is the lowest position of them."""
    compared = compared_in(question, gold.shape)
    same = (found == gold) | ~compared
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(found - gold))
    error = np.where(np.isnan(error), np.inf, error)
    wrong = error > tolerance
    worst = np.unravel_index(np.argmax(error / tolerance), error.shape)
    where: dict[str, int] = {}
    value = expected = 0.0
    if np.any(wrong):
        where, at = first_place(question, wrong)
        value, expected = float(found[at]), float(gold[at])
    return Difference(float(error[worst]), float(tolerance[worst]), wrong, where, value, expected)


def first_place(question: Question, wrong: Host) -> tuple[dict[str, int], tuple[int, ...]]:
    """The wrong number at the lowest position, by name and as an index."""
    places = [tuple(int(i) for i in place) for place in np.argwhere(wrong)]
    named = [_place(question, place) for place in places]
    index = min(range(len(named)), key=lambda n: tuple(named[n].values()))
    return named[index], places[index]


def compared_in(question: Question, shape: tuple[int, ...]) -> Host:
    """Which numbers are compared."""
    if question.kind != "bias" or question.region == "all":
        return np.ones(shape, bool)
    keys = question.q_pos if question.k_pos is None else question.k_pos
    before = keys[None, :] <= question.q_pos[:, None]
    return np.broadcast_to(before if question.region == "before" else ~before, shape)


def _place(question: Question, index: tuple[int, ...]) -> dict[str, int]:
    """An index as positions, row, head and channel, in the order of "first"."""
    if question.kind == "bias":
        head, i, j = index
        keys = question.q_pos if question.k_pos is None else question.k_pos
        return {"position": int(question.q_pos[i]), "key": int(keys[j]), "head": head}
    row, i, channel = index[0], index[-2], index[-1]
    at = question.q_pos[row, i]
    position = int(np.max(at)) if np.ndim(at) else int(at)
    if question.kind == "embedding":
        return {"position": position, "row": row, "channel": channel}
    return {"position": position, "row": row, "head": index[1], "channel": channel}


def told(difference: Difference) -> str:
    """The first difference, in words."""
    place = ", ".join(f"{name} {value}" for name, value in difference.where.items())
    count, size = int(np.sum(difference.wrong)), difference.wrong.size
    return (
        f"First at {place}: {difference.found:.6g}, the definition says "
        f"{difference.expected:.6g}; {count} of {size} numbers differ, by up to "
        f"{difference.error:.2g}."
    )
