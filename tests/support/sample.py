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


def few_of_jax(routes):
    """Parameters by implementation; in the quick part JAX's ``chunked`` stands for the others.

    JAX compiles each call for a second.
    """
    later = ("jax-reference", "jax-xla")
    return [
        pytest.param(*r.values, id=r.id, marks=(*r.marks, *[long] * (r.id in later)))
        for r in routes
    ]


def some(names, few, rest=exhaustive):
    """All names, or tuples of arguments, as parameters; those not in ``few`` have a mark."""
    listed = [(name, name if isinstance(name, tuple) else (name,)) for name in names]
    return [pytest.param(*own, marks=() if name in few else rest) for name, own in listed]
