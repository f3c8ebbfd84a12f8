"""The most that a call holds beside its arguments, as the allocator or the compiler counts it."""

from __future__ import annotations

from suite import GRID, SOME, lengths, subjects
from suite.frameworks import FAST, IMPLEMENTATIONS, framework_of


class Attention:
    """A training step of causal attention, ``B=1 H=8 D=64``, float32; NumPy's forward pass."""

    version, timeout, unit = "1", 600, "bytes"
    param_names = ("scheme", "implementation", "length")
    params = (SOME, IMPLEMENTATIONS if GRID == "full" else FAST, lengths(512, 2048))

    def setup(self, name, implementation, length):
        framework, own = framework_of(implementation)
        framework.begin(threads=1)
        subject = subjects.attention(name, framework, length, own)
        self.run = framework.ready(*subject, framework.kinds[-1])
        self.run()  # what is refused is n/a only from here

    def track_peak_memory(self, *_):
        return self.run.peak_memory()
