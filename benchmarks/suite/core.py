"""The core on NumPy: bias, transform, embedding and the reference attention of every scheme."""

from __future__ import annotations

import numpy as np

import posenc
from suite import DIM, HEADS, NAMES, Timed, hidden_states, lengths, make, warm


class Bias(Timed):
    """Dense bias ``(H, L, L)``."""

    param_names = ("scheme", "length")
    params = (NAMES, lengths(1024, 256))

    @warm
    def setup(self, name, length):
        self.scheme, self.arrays = make(name, length)
        self.pos = np.arange(length)
        if posenc.bias(self.scheme, self.pos[:1], self.pos[:1], self.arrays) is None:
            raise NotImplementedError("no bias")

    def time_bias(self, name, length):
        posenc.bias(self.scheme, self.pos, self.pos, self.arrays)


class Transform(Timed):
    """Queries ``(1, H, L, D)``, and embeddings ``(L, H D)``."""

    param_names = ("scheme", "length")
    params = (NAMES, lengths(1024, 4096))

    @warm
    def setup(self, name, length):
        self.scheme, self.arrays = make(name, length)
        self.pos = np.arange(length)
        self.x = np.random.default_rng(0).standard_normal((1, HEADS, length, DIM), np.float32)

    def time_transform(self, name, length):
        posenc.transform(self.scheme, self.x, self.pos, role="query", params=self.arrays)

    def time_embedding(self, name, length):
        posenc.embedding(self.scheme, self.pos, self.arrays)


class Attention(Timed):
    """The reference, causal, ``B=1 H=8 D=64``."""

    param_names = ("scheme", "length")
    params = (NAMES, lengths(1024, 256))

    @warm
    def setup(self, name, length):
        self.scheme, self.arrays = make(name, length)
        shape = (3, 1, HEADS, length, DIM)
        self.hidden = hidden_states(self.scheme, self.arrays, length)
        self.q, self.k, self.v = np.random.default_rng(0).standard_normal(shape, np.float32)

    def time_attention(self, name, length):
        posenc.attention(self.q, self.k, self.v, self.scheme, self.arrays, True, **self.hidden)


class Make(Timed):
    """A scheme from the catalogue; RoPE computes its frequencies with 60 digits."""

    param_names = ("scheme",)
    params = (NAMES,)

    @warm
    def setup(self, name):
        pass

    def time_make(self, name):
        make(name, 1024)
