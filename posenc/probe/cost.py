"""What a probe will cost on this machine, timed before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from posenc.probe.measures import Subject
from posenc.probe.pieces import Piece, Probe

_ENOUGH = 10.0  # seconds of a batch, after which longer ones are not timed


def estimate(probe: Probe, missing: Sequence[Piece], subject_of: Callable[[str], Subject]) -> float:
    """Seconds that the missing pieces take: one batch of each row and length is timed.

    After a batch of ``_ENOUGH`` seconds, longer lengths are taken to cost the square of theirs,
    which is too much rather than too little.
    """
    total = 0.0
    for row in dict.fromkeys(piece.row for piece in missing):
        own = [piece for piece in missing if piece.row == row]
        each = seconds_per_window(probe, sorted({piece.length for piece in own}), subject_of(row))
        total += sum(probe.windows(piece) * each[piece.length] for piece in own)
    return total


def seconds_per_window(probe: Probe, lengths: Sequence[int], subject: Subject) -> dict[int, float]:
    """Seconds of one window of each length, by the first batch; the first call warms up."""
    text, setting = probe.text, probe.setting
    starts = text.stretches(setting.windows, setting.longest)
    found: dict[int, float] = {}
    slow = 0
    for length in lengths:
        if slow:
            found[length] = found[slow] * (length / slow) ** 2
            continue
        firsts = text.windows(starts, setting.longest, length).ravel()
        inputs, labels, _ = text.cut(firsts[: subject.batch_size(length)], length)
        if not found:
            subject.answers(inputs[:1], labels[:1])
        begin = time.perf_counter()
        subject.answers(inputs, np.array(labels))
        took = time.perf_counter() - begin
        found[length] = took / len(inputs)
        slow = length if took > _ENOUGH else 0
    return found


def duration(seconds: float) -> str:
    """``1.5 s``, ``40 s``, ``12 min`` or ``3.5 h``."""
    if seconds > 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.{int(seconds < 10)}f} s"
