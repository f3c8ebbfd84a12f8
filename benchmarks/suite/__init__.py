"""asv benchmarks of posenc.

``POSENC_SCHEMES`` names schemes; without it the whole catalogue is measured. ``POSENC_GRID=full``
measures every length instead of the first of each list. asv forks each measurement from a process
that has imported the suite (``launch_method`` in its configuration), so frameworks load once.
"""

from __future__ import annotations

import functools
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # with more threads, other load on the machine shows

import posenc

# Every scheme gets the same call here, whether it makes sense for a model or not.
warnings.simplefilter("ignore", posenc.SchemeWarning)
NAMES = os.environ.get("POSENC_SCHEMES", "").split() or sorted(posenc.catalogue())
GRIDS = ("short", "full")
GRID = os.environ.get("POSENC_GRID") or GRIDS[0]
if GRID not in GRIDS:
    raise ValueError(f"POSENC_GRID must be one of {GRIDS}, got {GRID!r}")


def lengths(*every):
    """All lengths in the full grid, the first one in the short grid."""
    return sorted(every) if GRID == "full" else [every[0]]


class Timed:
    """Enough samples for a median: 3 to 20, within half a second.

    One process each (``rounds``): another would import and compile everything again.
    """

    rounds = 1
    repeat = (3, 20, 0.5)
    timeout = 600  # seconds; asv's default of 60 is too short to compile on a loaded machine


def warm(setup):
    """Decorate ``setup``, so that it runs once, and makes each timed call once.

    asv calls ``setup`` before every sample. This keeps compilation and first imports out of the
    figures, even with ``asv run --quick``, which makes one call.
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
