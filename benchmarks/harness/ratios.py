"""Goals for the timings: how fast a variant is relative to a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Row = dict[str, Any]
_SHOWN = 2  # variants of which a goal says why they were not measured


@dataclass(frozen=True)
class Goal:
    """The fastest of some of our variants against the fastest baseline: 2 is twice as fast.

    Attributes
    ----------
    name
        The two sides of the comparison.
    ours, baseline
        Patterns of variant names: of this library, and of others. No baseline: the time in which
        the host queues the same work; from 1 on the device does not wait for the host.
    stages
        Of the timings.
    least
        The ratio to reach; None: no goal, only reported.
    lengths
        Sequence lengths that the goal is for; empty: all.
    role
        Of our variants.
    """

    name: str
    ours: tuple[str, ...]
    baseline: str | None
    stages: tuple[str, ...] = ("forward", "backward", "step")
    least: float | None = None
    lengths: tuple[int, ...] = ()
    role: str = "ours"


_FLEX, _SDPA, _MASK = "none torch flex", "none torch sdpa*", "alibi torch sdpa mask"
_SKIPPING, _TRIAL = ("alibi flex", "alibi chunked"), "alibi score_mod"
_BACKWARD, _WHOLE = ("backward", "step"), ("forward", "step")
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
    Goal("flex ALiBi, device / host", ("alibi flex",), None, _WHOLE, 1.0, (8192,)),
    Goal("flex T5, learned, device / host", ("t5 flex, learned",), None, ("step",), 1.0, (8192,)),
    Goal("score_mod USE_TMA / without", ("alibi score_mod USE_TMA",), _TRIAL, role="trial"),
    Goal("score_mod FLASH / without", ("alibi score_mod FLASH",), _TRIAL, role="trial"),
)

# In JAX a step is one program, so there is no backward pass alone.
_CUDNN, _BIASED = "none jax cudnn", "alibi jax cudnn bias"
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
    Goal("pallas ALiBi, device / host", ("alibi pallas",), None, _WHOLE, 1.0, (8192,)),
)
GOALS = {"torch": _TORCH, "jax": _JAX}


def ratios(timings: Sequence[Row], goals: Sequence[Goal], lengths: Sequence[int]) -> list[Row]:
    """One record per goal, stage and length, also for what was not measured, with the reason.

    ``lengths`` are those of goals that are for all.
    """
    return [
        _ratio(goal, stage, length, timings)
        for goal in goals
        for stage in goal.stages
        for length in goal.lengths or lengths
    ]


def waits(row: Row, stage: str) -> bool:
    """Whether the host waited for the device: then the device also waited, and no time is right."""
    kind = "forward" if stage == "forward" else "step"
    return bool(row.get(f"{kind} makes the host wait"))


def _ratio(goal: Goal, stage: str, length: int, timings: Sequence[Row]) -> Row:
    at = [row for row in timings if row["length"] == length]
    own = [r for r in at if r["role"] == goal.role and _matches(r, goal.ours)]
    result = {"goal": goal.name, "stage": stage, "length": length, "least": goal.least}
    ours = _fastest(own, stage)
    if ours is None:
        return result | {"status": "not measured", "reason": _reason(own, goal.ours, stage)}
    if goal.baseline is None:
        kind = "forward" if stage == "forward" else "step"
        name, ms = "its host", ours[f"host of {kind}"]["median"]
    else:
        others = [r for r in at if r["role"] != "ours" and _matches(r, (goal.baseline,))]
        other = _fastest(others, stage)
        if other is None:
            reason = _reason(others, (goal.baseline,), stage)
            return result | {"status": "not measured", "reason": reason}
        name, ms = other["variant"], other[stage]["median"]
    value = ms / ours[stage]["median"] if goal.baseline else ours[stage]["median"] / ms
    status = "met" if goal.least is not None and value >= goal.least else "missed"
    return result | {
        "status": "measured" if goal.least is None else status,
        "ratio": float(f"{value:.4g}"),
        "ours": ours["variant"],
        "baseline": name,
    }


def _matches(row: Row, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(row["variant"], pattern) for pattern in patterns)


def _fastest(rows: Sequence[Row], stage: str) -> Row | None:
    able = [row for row in rows if _unusable(row, stage) is None]
    return min(able, key=lambda row: row[stage]["median"], default=None)


def _unusable(row: Row, stage: str) -> str | None:
    """Why a timing is not compared; None if it is."""
    if stage not in row:
        return row["reason"] or "not run"
    if not row.get("right", True):
        return "its results are wrong"
    return "it makes the host wait" if waits(row, stage) else None


def _reason(rows: Sequence[Row], patterns: Sequence[str], stage: str) -> str:
    """Why none of these variants is compared."""
    if not rows:
        return f"{' or '.join(patterns)}: not reached"
    return "; ".join(f"{row['variant']}: {_unusable(row, stage)}" for row in rows[:_SHOWN])
