"""Assignments and questions in noise: one token each, so that nothing waits for induction heads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from posenc.study.tasks.task import Integers


class Layout(NamedTuple):
    """Where ``M`` assignments and the questions stand in ``N`` rows of ``T`` tokens."""

    places: Integers
    """``(N, M)``: the places of assignments, ascending and uniform in the first three quarters."""
    asked: Integers
    """``(N, T)``: whether a token is a question."""
    which: Integers
    """``(N, T)``: the assignment that a question is about, one of those before it."""


def lay_out(
    rng: np.random.Generator, count: int, length: int, assignments: int, share: float
) -> Layout:
    """Draw a layout: ``share`` of the tokens after the first assignment are questions."""
    order = rng.random((count, length * 3 // 4))
    places = np.sort(np.argsort(order, axis=1)[:, :assignments], axis=1)
    known = (np.arange(length)[:, None] > places[:, None]).sum(axis=2)
    which = (rng.random((count, length)) * known).astype(np.int64)
    asked = (rng.random((count, length)) < share) & (known > 0)
    asked[:, -1] = True  # each row has a question
    np.put_along_axis(asked, places, False, axis=1)
    return Layout(places, asked, which)


def least_length(assignments: int) -> int:
    """The shortest rows that have room."""
    return -(-assignments * 4 // 3)


def permutations(rng: np.random.Generator, count: int, of: int, size: int) -> Integers:
    """``size`` different numbers below ``of`` in each of ``count`` rows."""
    return np.argsort(rng.random((count, of)), axis=1)[:, :size]
