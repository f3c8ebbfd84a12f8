"""A decoded token: attention of one query to a cache."""

from __future__ import annotations

from suite import SOME, OneThread, lengths, subjects, warm
from suite.frameworks import FRAMEWORKS, ready


class Step(OneThread):
    """``B=1 H=8 D=64``, ``implementation="auto"``, the cache as ``cache_needs`` asks for it."""

    param_names = ("scheme", "framework", "positions", "keys")
    params = (SOME, list(FRAMEWORKS), ["default", "given"], lengths(2048, 256, 16384))

    @warm
    def setup(self, name, framework, positions, keys):
        own = FRAMEWORKS[framework].begin(threads=1)
        subject = subjects.decoding(name, own, keys, given=positions == "given")
        self.run = ready(own, subject)

    def time_step(self, *_):
        self.run()
