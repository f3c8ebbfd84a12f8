"""How time and memory of attention grow with the length, as exponents.

2 where every query is compared with every key, 1 where all costs are per token. An exponent is
``log(cost(long) / cost(short)) / log(long / short)``.
"""

from __future__ import annotations

import functools
import math
import time

from suite import GRID, PLAIN, lengths, subjects
from suite.frameworks import FAST, STAGES, framework_of

_HEADS, _MOST = 2, 2**31  # bytes of a call
_SECONDS = 0.25  # of the calls whose fastest one counts


class Attention:
    """Causal attention, ``B=1 H=2 D=64``, float32, one thread; processor time of the fastest."""

    version, timeout, unit = "1", 600, "exponent"
    param_names = ("scheme", "implementation", "stage", "lengths")
    params = (
        PLAIN if GRID == "full" else PLAIN[:1],
        FAST,
        STAGES,
        lengths("1024 to 4096", "256 to 1024", "4096 to 16384"),
    )

    def setup(self, name, implementation, stage, between):
        framework, own = framework_of(implementation)
        framework.begin(threads=1)
        self.lengths = [int(length) for length in between.split(" to ")]
        subject = functools.partial(
            subjects.attention, name, framework, implementation=own, heads=_HEADS
        )
        self.runs = [framework.ready_within(_MOST, subject, n, stage) for n in self.lengths]

    def track_time_exponent(self, *_):
        return self._exponent([fastest(run) for run in self.runs])

    def track_memory_exponent(self, *_):
        return self._exponent([run.peak_memory() for run in self.runs])

    def _exponent(self, costs):
        return math.log(costs[1] / costs[0]) / math.log(self.lengths[1] / self.lengths[0])


def fastest(run):
    """Processor time of the fastest call."""
    run()
    end, found = time.perf_counter() + _SECONDS, []
    while len(found) < 2 or time.perf_counter() < end:
        begin = time.process_time()
        run()
        found.append(time.process_time() - begin)
    return min(found)
