"""asv benchmarks of posenc: one file, one question.

Params come from the catalogue and from the backends' lists of implementations.
``POSENC_SCHEMES`` names schemes, and ``POSENC_FRAMEWORKS`` frameworks. Without the first,
attention is timed with one scheme of each kind, at one length. What a scheme adds to a model is
timed, and its errors are tracked, for the whole catalogue. ``POSENC_GRID=full`` takes the whole
catalogue for all, and every length.

``benchmarks/dashboard.py`` measures in the environment that runs it. ``asv run`` and ``asv
continuous BASE HEAD`` with ``--config benchmarks/asv.conf.json`` make one of their own, in some two
minutes, and install each commit in it.

A benchmark that a scheme or an implementation refuses is n/a. asv forks each measurement from a
process that has imported the suite (``launch_method`` in its configuration), so frameworks load
once. A name and its params say what is measured; a class whose work changes takes another
``version``, and asv begins a new history.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
import warnings
from pathlib import Path

from posenc.apply.feature_needs import reads_features
from posenc.contract.protocol import Hook

sys.path.append(str(Path(__file__).resolve().parents[1]))  # asv adds no path to ``harness``

# Before NumPy, PyTorch and XLA read them. With more threads, other load on the machine shows, and
# threads that wait for work take the time of those that have some.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler, which counts memory

import numpy as np

import posenc
from posenc.attn.hidden_width import hidden_width
from posenc.cli.list import one_of_each_kind

# Every scheme gets the same call here, whether it makes sense for a model or not.
warnings.simplefilter("ignore", posenc.SchemeWarning)
GRIDS = ("short", "full")
GRID = os.environ.get("POSENC_GRID") or GRIDS[0]
if GRID not in GRIDS:
    raise ValueError(f"POSENC_GRID must be one of {GRIDS}, got {GRID!r}")

_ASKED = os.environ.get("POSENC_SCHEMES", "").split()
_MAKERS = posenc.catalogue()
EVERY = _ASKED or sorted(_MAKERS)
SOME = EVERY if _ASKED or GRID == "full" else one_of_each_kind()
HEADS, DIM = 8, 64
_LARGEST = 2**27  # numbers of a table


def make(name, length, heads=HEADS):
    """A scheme of a model with ``heads`` heads of ``DIM`` channels, and its first params."""
    scheme = _scheme(name, length, heads)
    largest = max((math.prod(s.shape) for s in scheme.param_specs().values()), default=0)
    if largest > _LARGEST:
        raise NotImplementedError(f"its table would hold {largest} numbers")
    return scheme, posenc.init_params(scheme)


def _scheme(name, length, heads=HEADS):
    # ``posenc.make`` reads the catalogue each time, which the import of the suite would feel.
    maker = _MAKERS.get(name) or functools.partial(posenc.make, name)
    return maker(num_heads=heads, head_dim=DIM, max_len=length, train_len=64)


def hidden_states(scheme, params, length):
    """``{"x": (1, L, C)}`` for a scheme that reads hidden states; ``{}`` for the others."""
    width = hidden_width(scheme, params)
    return {"x": normal(1, length, width, seed=1)} if width else {}


def normal(*shape, seed=0):
    """Normal numbers in float32."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def lengths(*every):
    """All lengths in the full grid, the first one in the short grid."""
    return sorted(every) if GRID == "full" else [every[0]]


def those(names, test):
    """The names whose schemes pass ``test``; all names if none does, because asv needs one."""
    return [name for name in names if test(_scheme(name, 64))] or names


def has_plain_bias(scheme):
    """Whether a scheme has a bias, and it depends on positions alone."""
    return Hook.BIAS in scheme.hooks() and not reads_features(scheme)


def _is_plain(scheme):
    return has_plain_bias(scheme) and Hook.ADJUST_SCORES not in scheme.hooks()


PLAIN = those(SOME, _is_plain)
"""Those of ``SOME`` that nearly every implementation serves."""


class Timed:
    """Enough samples for a median: 3 to 20, within half a second.

    One process each (``rounds``): another would import and compile everything again.
    """

    version = "1"
    rounds = 1
    repeat = (3, 20, 0.5)
    warmup_time = 0  # ``warm`` already made a call
    timeout = 600  # seconds; asv's default of 60 is too short to compile on a loaded machine


class OneThread(Timed):
    """In processor time of this process: other load on the machine shows less than in wall time."""

    timer = time.process_time


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
