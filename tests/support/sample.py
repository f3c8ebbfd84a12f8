"""Which schemes a law or a case is tried with: a few always, the others in turn.

A product of laws, implementations and schemes grows with each scheme by as many tests as there are
laws and implementations. Here each further scheme adds one test per implementation.
"""

from __future__ import annotations

import pytest

long, exhaustive = pytest.mark.long, pytest.mark.exhaustive


def in_turn(names, place, places, *, times=1):
    """What the test at ``place`` of ``places`` takes of ``names``.

    Together the tests take each name ``times`` times.
    """
    names = list(names)
    return [name for n, name in enumerate(names) if (place - n) % places < times]


def some(names, few, rest=exhaustive):
    """All names as parameters; those beside ``few`` have the mark ``rest``."""
    return [n if n in few else pytest.param(n, marks=rest) for n in names]
