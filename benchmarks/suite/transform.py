"""Queries and keys that are transformed by their positions, and tokens' embeddings."""

from __future__ import annotations

import numpy as np

from posenc.apply.embed import has_embedding
from posenc.apply.transform import has_transform
from suite import EVERY, OneThread, lengths, subjects, those, warm
from suite.frameworks import FRAMEWORKS, STAGES, ready

_LENGTHS = lengths(1024, 256, 4096, 16384)


class Transform(OneThread):
    """Queries ``(1, H, L, D)`` with ``H=8 D=64``; a training step adds all gradients."""

    param_names = ("scheme", "framework", "stage", "length")
    params = (those(EVERY, has_transform), list(FRAMEWORKS), STAGES, _LENGTHS)

    @warm
    def setup(self, name, framework, stage, length):
        own = FRAMEWORKS[framework].begin(threads=1)
        self.run = ready(own, subjects.transform(name, own, np.arange(length)), stage)

    def time_transform(self, *_):
        self.run()


class Embedding(OneThread):
    """The term ``(L, H D)`` of the tokens' embeddings."""

    param_names = ("scheme", "framework", "length")
    params = (those(EVERY, has_embedding), list(FRAMEWORKS), _LENGTHS)

    @warm
    def setup(self, name, framework, length):
        own = FRAMEWORKS[framework].begin(threads=1)
        self.run = ready(own, subjects.embedding(name, own, np.arange(length)))

    def time_embedding(self, *_):
        self.run()
