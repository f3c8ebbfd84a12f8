"""Long causal attention on two threads, in wall time: ``B=1 H=8 D=64``, float32.

The schemes whose bias depends on positions alone. Implementations that hold all scores are n/a.
"""

from __future__ import annotations

import time

from suite import PLAIN, attention, lengths
from suite.frameworks import FAST

MOST = 2**29  # bytes; all scores of 4096 tokens take more
_LENGTHS = lengths(4096, 1024, 8192, 16384)


class Forward(attention.Forward):
    """Without gradients."""

    params = (PLAIN, FAST, _LENGTHS)
    threads, most, timer = 2, MOST, time.perf_counter


class TrainingStep(attention.TrainingStep):
    """Forward, and the gradients of q, k, v and params."""

    params = (PLAIN, FAST, _LENGTHS)
    threads, most, timer = 2, MOST, time.perf_counter


class WithoutPositions(attention.WithoutPositions):
    """The framework's own attention, as the ratios' baseline."""

    params = (*attention.WithoutPositions.params[:2], _LENGTHS)
    threads, timer = 2, time.perf_counter
