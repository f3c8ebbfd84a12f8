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


class Turns:
    """Parametrizes tests of a file with subjects: all take some, the others come in turn.

    Each of ``names`` that is not in ``always`` meets ``times`` of any ``tests`` tests in a row in
    the quick part, and the others in the long part.
    """

    def __init__(self, names, always, *, tests, times):
        self._always, self._tests, self._times = always, tests, times
        self._names, self._place = list(names), 0

    def __call__(self, test):
        others = [name for name in self._names if name not in self._always]
        own = in_turn(others, self._place, self._tests, times=self._times)
        self._place += 1
        few = {*self._always, *own}
        return pytest.mark.parametrize("subject", some(self._names, few, long))(test)


def few_of_jax(routes, *others):
    """Parameters by implementation; in the quick part JAX's ``chunked`` stands for the others.

    JAX compiles each call for a second. ``others`` are left to the long part too.
    """
    later = ("jax-reference", "jax-xla", *others)
    return [
        pytest.param(*r.values, id=r.id, marks=(*r.marks, *[long] * (r.id in later)))
        for r in routes
    ]


def some(names, few, rest=exhaustive):
    """All names, or tuples of arguments, as parameters; those not in ``few`` have a mark."""
    listed = [(name, name if isinstance(name, tuple) else (name,)) for name in names]
    return [pytest.param(*own, marks=() if name in few else rest) for name, own in listed]
