"""A budget of time, interleaved runs, and medians."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Sample = dict[str, float]  # milliseconds of one run, by stage


class Budget:
    """Seconds and compilations that a part of the work may use."""

    def __init__(
        self,
        seconds: float,
        compiles: int = 10**6,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now, self._end = now, now() + seconds
        self.compiles = compiles

    def left(self) -> float:
        """Seconds left."""
        return self._end - self._now()

    def refuses(self, seconds: float = 0.0, compiles: int = 0) -> str | None:
        """Why work of this size must not start; None if it may."""
        if compiles > self.compiles:
            return "no compilations left"
        return None if self.left() > seconds else "no time left"


def interleave(
    runs: Mapping[Any, Callable[[], Sample]],
    rounds: int,
    budget: Budget,
    seed: int = 0,
    on_round: Callable[[Mapping[Any, list[Sample]]], None] = lambda samples: None,
) -> dict[Any, list[Sample]]:
    """Samples of every run: each round runs all of them once, so that drift affects all alike.

    Each round has another order, because a run leaves heat and filled caches. The first round
    always completes. Empty samples, of failed runs, are left out. ``on_round`` gets the samples so
    far after each round.
    """
    samples: dict[Any, list[Sample]] = {name: [] for name in runs}
    order, shuffler = list(runs), random.Random(seed)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            sample = runs[name]()
            if sample:
                samples[name].append(sample)
        on_round(samples)
        if budget.refuses():
            break
    return samples


def summary(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Median, quartiles and count of every stage."""
    stages = {}
    for stage in samples[0] if samples else ():
        low, middle, high = np.percentile([s[stage] for s in samples], [25, 50, 75])
        stages[stage] = {"median": middle, "q1": low, "q3": high, "n": len(samples)}
    return {
        stage: {name: float(f"{number:.6g}") for name, number in numbers.items()}
        for stage, numbers in stages.items()
    }
