"""The clock: a budget of time, calls that take turns, and the record of a speed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Sample = dict[str, float]  # milliseconds of one run, by stage
NO_END = 1e9  # seconds


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


def take_turns(
    calls: Mapping[Any, Callable[[], Any]],
    rounds: tuple[int, int],
    *,
    seconds: float = 0.0,
    shortest: float = 2e-3,
    now: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Milliseconds of every call, in rounds in which each has one sample.

    Parameters
    ----------
    rounds
        At least and at most.
    seconds
        What allows more rounds than the least.
    shortest
        Seconds of a sample; shorter calls are repeated in it.
    now
        The clock, in seconds.
    """
    numbers, total = {}, 0.0
    for name, call in calls.items():  # each has run once, for its check
        once = max(1e-3 * mean(call, 1, now), 1e-7)
        numbers[name] = max(1, round(shortest / once))
        total += numbers[name] * once
    least, most = rounds

    def sampler(name: Any) -> Callable[[], Sample]:
        return lambda: {"ms": mean(calls[name], numbers[name], now)}

    taken = interleave(
        {name: sampler(name) for name in calls},
        min(most, max(least, int(seconds / total))),
        Budget(NO_END),
    )
    return {name: [sample["ms"] for sample in samples] for name, samples in taken.items()}


def mean(call: Callable[[], Any], number: int, now: Callable[[], float]) -> float:
    """Milliseconds of a call, as the mean of some."""
    begun = now()
    for _ in range(number):
        call()
    return 1e3 * (now() - begun) / number


@dataclass(frozen=True)
class Speed:
    """A time, or a ratio of times, as it was measured: the one record of it in all results."""

    median: float
    q1: float
    q3: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Speed:
        """Median, quartiles and count."""
        low, middle, high = (float(f"{n:.6g}") for n in np.percentile(samples, [25, 50, 75]))
        return cls(middle, low, high, len(samples))

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Speed:
        """From JSON."""
        return cls(**written)

    def json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def summary(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """The speed of every stage, as JSON."""
    stages = samples[0] if samples else ()
    return {stage: Speed.of([s[stage] for s in samples]).json() for stage in stages}
