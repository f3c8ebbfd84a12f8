"""asv benchmarks of posenc.

``POSENC_SCHEMES`` names schemes. Without it, one scheme of each kind is measured, at one length.
``POSENC_GRID=full`` measures the whole catalogue, at every length. asv forks each measurement from
a process that has imported the suite (``launch_method`` in its configuration), so frameworks load
once.
"""

from __future__ import annotations

import functools
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # with more threads, other load on the machine shows

import numpy as np

import posenc
from posenc.attn.features import hidden_width
from posenc.cli.list import one_of_each_kind

# Every scheme gets the same call here, whether it makes sense for a model or not.
warnings.simplefilter("ignore", posenc.SchemeWarning)
GRIDS = ("short", "full")
GRID = os.environ.get("POSENC_GRID") or GRIDS[0]
if GRID not in GRIDS:
    raise ValueError(f"POSENC_GRID must be one of {GRIDS}, got {GRID!r}")

NAMES = os.environ.get("POSENC_SCHEMES", "").split() or (
    sorted(posenc.catalogue()) if GRID == "full" else one_of_each_kind()
)
HEADS, DIM = 8, 64


def make(name, length):
    """A scheme of a model with ``HEADS`` heads of ``DIM`` channels, and its first params."""
    sizes = {"num_heads": HEADS, "head_dim": DIM, "max_len": length, "train_len": 64}
    scheme = posenc.make(name, **sizes)
    return scheme, posenc.init_params(scheme)


def hidden_states(scheme, params, length):
    """``{"x": (1, L, C)}`` for a scheme that reads hidden states; ``{}`` for the others."""
    width = hidden_width(scheme, params)
    if not width:
        return {}
    return {"x": np.random.default_rng(1).standard_normal((1, length, width), np.float32)}


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
