"""The largest error of float32 results against NumPy's in float64.

In spacings of the largest expected value: correct rounding is off by at most 0.5. The first values
of the params, the same numbers in both.
"""

from __future__ import annotations

import numpy as np

from posenc.apply.embed import has_embedding
from posenc.apply.transform import has_transform
from suite import EVERY, has_plain_bias, lengths, subjects, those
from suite.frameworks import FRAMEWORKS, NumPy

_POSITIONS = sorted({2**24, *lengths(2**12, 2**7, 2**17, 2**20)})


class _Tracked:
    version, timeout, unit = "1", 600, "spacings"

    def track_max_error(self, *_):
        return max_error(self.run(), self.exact)


class Bias(_Tracked):
    """The dense bias."""

    param_names = ("scheme", "framework", "positions up to")
    params = (those(EVERY, has_plain_bias), list(FRAMEWORKS), _POSITIONS)

    def setup(self, name, framework, upto):
        pos = positions(upto)
        self.run = ready(FRAMEWORKS[framework], subjects.bias, name, pos)
        self.exact = exact(subjects.bias, name, pos, np.float64)


class Transform(_Tracked):
    """Transformed queries."""

    param_names = ("scheme", "framework", "positions up to")
    params = (those(EVERY, has_transform), list(FRAMEWORKS), _POSITIONS)

    def setup(self, name, framework, upto):
        pos = positions(upto)
        self.run = ready(FRAMEWORKS[framework], subjects.transform, name, pos)
        self.exact = exact(subjects.transform, name, pos)


class Embedding(_Tracked):
    """The term of the tokens' embeddings."""

    param_names = ("scheme", "framework", "positions up to")
    params = (those(EVERY, has_embedding), list(FRAMEWORKS), _POSITIONS)

    def setup(self, name, framework, upto):
        pos = positions(upto)
        self.run = ready(FRAMEWORKS[framework], subjects.embedding, name, pos)
        self.exact = exact(subjects.embedding, name, pos, np.float64)


class Attention(_Tracked):
    """Causal attention of 64 tokens, ``H=8 D=64``, ``implementation="auto"``."""

    param_names = ("scheme", "framework")
    params = (EVERY, list(FRAMEWORKS))

    def setup(self, name, framework):
        own = FRAMEWORKS[framework]
        self.run = ready(own, subjects.attention, name, 64)
        self.exact = own.layout(exact(subjects.attention, name, 64))


def ready(framework, subject, name, size):
    """The float32 result's call."""
    framework.begin(threads=1)
    return framework.ready(*subject(name, framework, size), "forward")


def positions(upto):
    """0, powers of two and their neighbours, and random positions, below ``upto``."""
    powers = 2 ** np.arange(upto.bit_length())
    drawn = np.random.default_rng(0).integers(0, upto, 32)
    every = np.unique(np.concatenate([powers - 1, powers, powers + 1, drawn]))
    return every[every < upto]


def exact(subject, name, size, *dtype):
    """What NumPy computes in float64 from the same numbers.

    ``dtype`` is for subjects that have no numbers but positions.
    """
    function, arrays = subject(name, NumPy(), size, *dtype)
    wide = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in arrays.items()}
    return np.asarray(function(wide), np.float64)


def max_error(result, expected):
    """In spacings of the largest finite expected value; infinite where only one is."""
    result = np.asarray(result, np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(result[~finite], expected[~finite]):
        return np.inf
    spacing = np.spacing(np.max(np.abs(expected[finite]), initial=2.0**-126).astype(np.float32))
    return float(np.max(np.abs(result[finite] - expected[finite]), initial=0) / spacing)
