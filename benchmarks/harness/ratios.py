"""Goals for the timings: how fast a variant is relative to a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """The fastest of some of our variants against the fastest baseline: 2 is twice as fast.

    Attributes
    ----------
    name
        The two sides of the comparison.
    ours, baseline
        Patterns of variant names: of this library, and of others.
    stages
        Of the timings.
    least
        The ratio to reach; None: no goal, only reported.
    lengths
        Sequence lengths that the goal is for; empty: all.
    """

    name: str
    ours: tuple[str, ...]
    baseline: str
    stages: tuple[str, ...] = ("forward", "backward", "step")
    least: float | None = None
    lengths: tuple[int, ...] = ()


_FLEX, _SDPA, _MASK = "none torch flex", "none torch sdpa*", "alibi torch sdpa mask"
_SKIPPING = ("alibi flex", "alibi chunked")
_BACKWARD = ("backward", "step")
_TORCH = (
    Goal("flex ALiBi / plain flex", ("alibi flex*",), _FLEX, least=0.95),
    Goal("flex ALiBi, all blocks / plain flex", ("alibi flex, all blocks",), _FLEX, least=0.95),
    Goal("flex T5 / plain flex", ("t5 flex",), _FLEX, least=0.95),
    Goal("flex T5, learned / plain flex", ("t5 flex, learned",), _FLEX, _BACKWARD, least=0.8),
    Goal("flex learned slopes / plain flex", ("slopes flex",), _FLEX),
    Goal("folded ALiBi / best SDPA", ("alibi folded",), _SDPA, least=0.9),
    Goal("best ALiBi / best SDPA", ("alibi *",), _SDPA, least=0.9),
    Goal("ALiBi, skipping / best SDPA", _SKIPPING, _SDPA),
    Goal("ALiBi, skipping, far / best SDPA", _SKIPPING, _SDPA, least=3.0, lengths=(65536,)),
    Goal("best T5, learned / best SDPA", ("t5 *learned",), _SDPA, _BACKWARD, least=0.8),
    Goal("best ALiBi / SDPA with a dense bias", ("alibi *",), _MASK),
)

# In JAX a step is one program, so there is no backward pass alone.
_CUDNN, _BIASED, _WHOLE = "none jax cudnn", "alibi jax cudnn bias", ("forward", "step")
_JAX = (
    Goal("pallas, no bias / cuDNN", ("none pallas",), _CUDNN, _WHOLE),
    Goal("pallas ALiBi / cuDNN", ("alibi pallas*",), _CUDNN, _WHOLE),
    Goal("pallas T5 / cuDNN", ("t5 pallas",), _CUDNN, _WHOLE),
    Goal("pallas T5, learned / cuDNN", ("t5 pallas, learned",), _CUDNN, ("step",)),
    Goal("pallas learned slopes / cuDNN", ("slopes pallas",), _CUDNN, ("step",)),
    Goal("folded ALiBi / cuDNN", ("alibi folded",), _CUDNN, _WHOLE),
    Goal("pallas, no bias, 8192 / cuDNN", ("none pallas",), _CUDNN, ("forward",), 0.7, (8192,)),
    Goal("pallas, no bias, 8192 / cuDNN", ("none pallas",), _CUDNN, ("step",), 0.6, (8192,)),
    Goal("pallas ALiBi, 8192 / cuDNN", ("alibi pallas*",), _CUDNN, ("forward",), 0.7, (8192,)),
    Goal("pallas ALiBi, 8192 / cuDNN", ("alibi pallas*",), _CUDNN, ("step",), 0.6, (8192,)),
    Goal("pallas ALiBi, far / cuDNN", ("alibi pallas*",), _CUDNN, _WHOLE, 3.0, (65536,)),
    Goal("pallas ALiBi / cuDNN with a dense bias", ("alibi pallas*",), _BIASED, _WHOLE, 2.0),
    Goal("pallas T5 / cuDNN with a dense bias", ("t5 pallas",), _BIASED, _WHOLE, 2.0),
)
GOALS = _TORCH + _JAX


def ratios(timings: Sequence[Row], goals: Sequence[Goal] = GOALS) -> list[Row]:
    """One record per goal, length and stage for which both sides were measured."""
    lengths = sorted({row["length"] for row in timings})
    return [
        record
        for goal in goals
        for length in lengths
        if not goal.lengths or length in goal.lengths
        for record in _records(goal, length, timings)
    ]


def _records(goal: Goal, length: int, timings: Sequence[Row]) -> Iterator[Row]:
    for stage in goal.stages:
        # Wrong results are not compared.
        able = [
            row
            for row in timings
            if row["length"] == length and stage in row and row.get("right", True)
        ]
        ours = _fastest([r for r in able if r["ours"] and _matches(r, *goal.ours)], stage)
        other = _fastest([r for r in able if not r["ours"] and _matches(r, goal.baseline)], stage)
        if ours is None or other is None:
            continue
        value = other[stage]["median"] / ours[stage]["median"]
        yield {
            "goal": goal.name,
            "stage": stage,
            "length": length,
            "ratio": float(f"{value:.4g}"),
            "least": goal.least,
            "met": None if goal.least is None else value >= goal.least,
            "ours": ours["variant"],
            "baseline": other["variant"],
        }


def _matches(row: Row, *patterns: str) -> bool:
    return any(fnmatchcase(row["variant"], pattern) for pattern in patterns)


def _fastest(rows: Sequence[Row], stage: str) -> Row | None:
    return min(rows, key=lambda row: row[stage]["median"], default=None)
