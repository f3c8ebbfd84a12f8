"""The largest error of float32 results against NumPy's in float64.

In spacings of the largest expected value: correct rounding is off by at most 0.5. The first values
of the params, the same numbers in both.
"""

from __future__ import annotations

import numpy as np
from harness.run import load

from posenc.apply.embed import has_embedding
from posenc.apply.transform import has_transform
from suite import EVERY, has_plain_bias, lengths, subjects, those
from suite.frameworks import FRAMEWORKS, ready

_POSITIONS = sorted({2**24, *lengths(2**12, 2**7, 2**17, 2**20)})


class _Tracked:
    version, timeout, unit = "1", 600, "spacings"
    param_names = ("scheme", "framework", "positions up to")
    wide = (np.float64,)  # for subjects that have no numbers but positions

    def setup(self, name, framework, upto):
        self.begin(name, framework, positions(upto), *self.wide)

    def begin(self, name, framework, size, *dtype):
        """Make the call in float32, and compute what it should give."""
        own = self.framework = FRAMEWORKS[framework].begin(threads=1)
        self.run = ready(own, self.subject(name, own, size))
        self.exact = exact(self.subject, name, size, *dtype)

    def track_max_error(self, *_):
        (result,), _ = self.run.answers()
        return max_error(self.framework.host(result), self.exact)


class Bias(_Tracked):
    """The dense bias."""

    params = (those(EVERY, has_plain_bias), list(FRAMEWORKS), _POSITIONS)
    subject = staticmethod(subjects.bias)


class Transform(_Tracked):
    """Transformed queries."""

    params = (those(EVERY, has_transform), list(FRAMEWORKS), _POSITIONS)
    subject, wide = staticmethod(subjects.transform), ()


class Embedding(_Tracked):
    """The term of the tokens' embeddings."""

    params = (those(EVERY, has_embedding), list(FRAMEWORKS), _POSITIONS)
    subject = staticmethod(subjects.embedding)


class Attention(_Tracked):
    """Causal attention of 64 tokens, ``H=8 D=64``, ``implementation="auto"``."""

    param_names = ("scheme", "framework")
    params = (EVERY, list(FRAMEWORKS))
    subject = staticmethod(subjects.attention)

    def setup(self, name, framework):
        self.begin(name, framework, 64)
        self.exact = self.framework.layout(self.exact)


def positions(upto):
    """0, powers of two and their neighbours, and random positions, below ``upto``."""
    powers = 2 ** np.arange(upto.bit_length())
    drawn = np.random.default_rng(0).integers(0, upto, 32)
    every = np.unique(np.concatenate([powers - 1, powers, powers + 1, drawn]))
    return every[every < upto]


def exact(subject, name, size, *dtype):
    """What NumPy computes in float64 from the same numbers."""
    function, arrays = subject(name, load("numpy"), size, *dtype)
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
