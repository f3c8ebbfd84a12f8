"""What a training has come to besides its weights: curve, norms of gradients, spikes, times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_BEFORE = 100  # steps that a step is compared with
_DEVIATIONS = 7.0
_LEAST = 0.1  # bits; where a solved task leaves losses near 0, less is no spike
_NORMAL = 1.4826  # robust deviations of a normal distribution in one median absolute deviation


def count_spikes(before: Sequence[float], losses: Array) -> int:
    """How many of the ``losses``, which follow those ``before``, are spikes.

    A spike is a loss in bits above the median of the 100 losses before it by more than 7 robust
    deviations (1.4826 times the median absolute deviation from that median), and by more than 0.1.
    The first 100 steps are never spikes. The form is that of OLMo 2's spike score (arXiv
    2501.00656): 7 standard deviations from the mean of 1000 values. Medians are ours, so that a
    spike does not hide the next one in so short a window.
    """
    every = np.asarray([*before[-_BEFORE:], *losses], dtype=np.float64)
    if len(every) <= _BEFORE:
        return 0
    windows = np.lib.stride_tricks.sliding_window_view(every, _BEFORE)[:-1]
    middle = np.median(windows, axis=1)
    spread = _NORMAL * np.median(np.abs(windows - middle[:, None]), axis=1)
    above = every[_BEFORE:] - middle
    return int((above > np.maximum(_DEVIATIONS * spread, _LEAST)).sum())


@dataclass
class History:
    """Facts of a training so far; ``text`` and ``of_text`` keep them exactly.

    Attributes
    ----------
    step
        Steps that were trained.
    curve, norms
        Per chunk of steps: its last step and the mean loss in bits; its last step, and the mean and
        the largest norm of the gradients before clipping. No norms if the trainer tells none.
    clipped, spikes
        Steps with a gradient that was clipped, and steps with a spike of the loss.
    seconds
        Of training at the start and after each chunk.
    checks, solved
        Checks in a row at which the task was solved, and the step from which on it counts so.
    resumed
        Steps at which an interrupted training went on.
    recent
        The last losses.
    """

    step: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    norms: list[tuple[int, float, float]] = field(default_factory=list)
    clipped: int = 0
    spikes: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0])
    checks: int = 0
    solved: int | None = None
    resumed: list[int] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)

    def add(self, losses: Array, norms: Array | None, clip: float, seconds: float) -> None:
        """Note a chunk of steps: losses in bits, norms before clipping, seconds since the start."""
        self.step += len(losses)
        self.curve.append((self.step, float(losses.mean())))
        self.spikes += count_spikes(self.recent, losses)
        self.recent = [*self.recent, *map(float, losses)][-_BEFORE:]
        self.seconds.append(seconds)
        if norms is not None:
            self.norms.append((self.step, float(norms.mean()), float(norms.max())))
            self.clipped += int((norms > clip).sum())

    def facts(self) -> dict[str, Any]:
        """The part of a record that says them."""
        return {
            "steps": self.step,
            "solved": self.solved,
            "curve": self.curve,
            "gradient_norms": self.norms or None,
            "clipped": self.clipped if self.norms else None,
            "spikes": self.spikes,
            "resumed": self.resumed,
            "train_seconds": self.seconds[-1],
        }

    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> History:
        """What ``text`` wrote; ``ValueError`` or ``TypeError`` for anything else."""
        return cls(**json.loads(text))


def mean_norm(norms: Sequence[Sequence[float]]) -> float:
    """The mean norm of all steps, of the means of chunks."""
    ends = [int(chunk[0]) for chunk in norms]
    sizes = np.diff([0, *ends])
    return float(np.average([chunk[1] for chunk in norms], weights=sizes))
