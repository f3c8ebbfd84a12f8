"""How time and memory of attention grow with the length, as exponents.

2 where every query is compared with every key, 1 where all costs are per token. An exponent is
``log(cost(long) / cost(short)) / log(long / short)``. Exponents of memory repeat exactly. Those of
time lie within 0.2 of each other on a machine with other work.
"""

from __future__ import annotations

import functools
import math
import time

from suite import GRID, PLAIN, lengths, subjects
from suite.frameworks import FAST, STAGES, framework_of, ready_within

_HEADS, _MOST = 2, 2**31  # bytes of a call
_TURNS, _TURN = 4, 0.1  # number; seconds of processor time


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
        self.runs = [ready_within(_MOST, framework, subject, n, stage) for n in self.lengths]
        for run in self.runs:  # what is refused is n/a only from here
            run()

    def track_time_exponent(self, *_):
        return self._exponent(fastest(self.runs))

    def track_memory_exponent(self, *_):
        return self._exponent([run.peak_memory() for run in self.runs])

    def _exponent(self, costs):
        return math.log(costs[1] / costs[0]) / math.log(self.lengths[1] / self.lengths[0])


def fastest(runs):
    """Processor time of the fastest call of each, in turns of several calls.

    The first calls of a turn find caches and memory as the other has left them.
    """
    found = [math.inf] * len(runs)
    for _ in range(_TURNS):
        for index, run in enumerate(runs):
            end, calls = time.process_time() + _TURN, 0
            while calls < 2 or time.process_time() < end:
                begin = time.process_time()
                run()
                found[index] = min(found[index], time.process_time() - begin)
                calls += 1
    return found
