"""The frameworks and implementations that the suite measures, and what it runs on them."""

from __future__ import annotations

import importlib.util
import math
import os

from harness.run import FORWARD, KINDS, load

STAGES = ("forward", "training step")
_KINDS = dict(zip(STAGES, KINDS, strict=True))
_SMALL = 512, 1024


def ready(framework, subject, stage=FORWARD):
    """A function and its arrays, ready to be called on a framework."""
    return framework.ready(*subject, _KINDS[stage])


def ready_within(most, framework, subject, length, stage):
    """``ready(framework, subject(length), stage)``; n/a if it would take more bytes than ``most``.

    What is not compiled is foreseen from how memory grows between two short lengths.
    """
    if framework.compiles:
        run = ready(framework, subject(length), stage)
        _refuse_above(most, run.peak_memory())  # known before the first call
        return run
    if length > _SMALL[1]:
        less, more = (ready(framework, subject(n), stage).peak_memory() for n in _SMALL)
        exponent = max(1.0, math.log2(more / less))
        _refuse_above(most, more * (length / _SMALL[1]) ** exponent)
    return ready(framework, subject(length), stage)


def _refuse_above(most, needed):
    if needed > most:
        raise NotImplementedError(f"a call would take {needed / 2**30:.1f} GiB")


_ASKED = os.environ.get("POSENC_FRAMEWORKS", "").split()
FRAMEWORKS = {
    name: load(name)
    for name in ("numpy", "torch", "jax")
    if name in (_ASKED or [name]) and importlib.util.find_spec(name) is not None
}
IMPLEMENTATIONS = [
    f"{framework.name} {name}"
    for framework in FRAMEWORKS.values()
    for name in framework.implementations
]
FAST = [
    f"{framework.name} {name}"
    for framework in FRAMEWORKS.values()
    for name in framework.implementations
    if name != "reference" or len(framework.implementations) == 1
]
"""Without the references of frameworks that have more than these."""


def framework_of(implementation):
    """The framework of one of ``IMPLEMENTATIONS``, and the name that the framework knows."""
    framework, _, name = implementation.partition(" ")
    return FRAMEWORKS[framework], name
