"""Causal attention with every scheme on every implementation: ``B=1 H=8 D=64``, float32."""

from __future__ import annotations

import functools

from suite import GRID, SOME, OneThread, lengths, subjects, warm
from suite.frameworks import FAST, FRAMEWORKS, IMPLEMENTATIONS, STAGES, framework_of, ready_within

MOST = 4 * 2**30  # bytes of a call
_LENGTHS = lengths(512, 256, 2048)


class Forward(OneThread):
    """Without gradients, one thread."""

    param_names = ("scheme", "implementation", "length")
    params = (SOME, IMPLEMENTATIONS, _LENGTHS)
    stage, threads, most = STAGES[0], 1, MOST

    @warm
    def setup(self, name, implementation, length):
        framework, own = framework_of(implementation)
        framework.begin(self.threads)
        subject = functools.partial(subjects.attention, name, framework, implementation=own)
        self.run = ready_within(self.most, framework, subject, length, self.stage)

    def time_attention(self, *_):
        self.run()


class TrainingStep(Forward):
    """Forward, and the gradients of q, k, v, params and hidden states; one thread."""

    params = (SOME, IMPLEMENTATIONS if GRID == "full" else FAST, _LENGTHS)
    stage = STAGES[1]


class WithoutPositions(OneThread):
    """The framework's own attention, as the ratios' baseline; one thread.

    ``scaled_dot_product_attention(is_causal=True)``, ``dot_product_attention(is_causal=True)``.
    """

    param_names = ("framework", "stage", "length")
    params = (list(FRAMEWORKS), STAGES, _LENGTHS)
    threads = 1

    @warm
    def setup(self, framework, stage, length):
        own = FRAMEWORKS[framework].begin(self.threads)
        subject = functools.partial(subjects.without_positions, own)
        self.run = ready_within(MOST, own, subject, length, stage)

    def time_attention(self, *_):
        self.run()
