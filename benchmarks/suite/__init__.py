"""Benchmarks of posenc: what they measure, and how asv is to sample it.

``POSENC_SCHEMES`` names schemes; without it the whole catalogue is measured. ``POSENC_GRID=full``
takes every length instead of the first of each list. asv forks each measurement from a process
that has imported the suite (``launch_method`` in its configuration): frameworks load once.
"""

from __future__ import annotations

import functools
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other time the load

import posenc

# Every scheme meets the same call here, whether it makes sense for a model or not.
warnings.simplefilter("ignore", posenc.SchemeWarning)
NAMES = os.environ.get("POSENC_SCHEMES", "").split() or sorted(posenc.catalogue())
GRIDS = ("short", "full")
GRID = os.environ.get("POSENC_GRID") or GRIDS[0]
if GRID not in GRIDS:
    raise ValueError(f"POSENC_GRID must be one of {GRIDS}, got {GRID!r}")


def lengths(*every):
    """All of them in the full grid, the first in the short one."""
    return sorted(every) if GRID == "full" else [every[0]]


class Timed:
    """Enough samples for a median: at most 20, at least 3, for half a second in between.

    One process each (``rounds``): another would import and compile everything once more.
    """

    rounds = 1
    repeat = (3, 20, 0.5)
    timeout = 600  # seconds; asv's own 60 end a compilation on a loaded machine


def warm(setup):
    """Decorate ``setup``: what it builds is built once, and each timed call is made once.

    asv calls ``setup`` before every sample. Compilation and first imports stay out of the figures,
    even with ``asv run --quick``, which makes one call.
    """

    @functools.wraps(setup)
    def once(self, *params):
        if getattr(self, "_warm_for", None) == params:
            return
        setup(self, *params)
        for name in dir(self):
            if name.startswith("time_"):
                getattr(self, name)(*params)
        self._warm_for = params

    return once
