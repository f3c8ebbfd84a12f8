"""The dense bias of every head, as a model that holds all scores adds it."""

from __future__ import annotations

import numpy as np

from suite import EVERY, OneThread, has_plain_bias, lengths, subjects, those, warm
from suite.frameworks import FRAMEWORKS, STAGES, ready


class Bias(OneThread):
    """``(H, L, L)`` with ``H=8``, from positions; a training step adds its params' gradients."""

    param_names = ("scheme", "framework", "stage", "length")
    params = (those(EVERY, has_plain_bias), list(FRAMEWORKS), STAGES, lengths(512, 256, 2048))

    @warm
    def setup(self, name, framework, stage, length):
        own = FRAMEWORKS[framework].begin(threads=1)
        self.run = ready(own, subjects.bias(name, own, np.arange(length)), stage)

    def time_bias(self, *_):
        self.run()
