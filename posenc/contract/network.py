"""A small network of one number, as a bias may be."""

from __future__ import annotations

from typing import Any

from posenc.contract.operations import operations_of
from posenc.contract.specs import Array, Namespace
from posenc.contract.tables import HeadTable


def network(x: Array, w1: Array, b1: Array, w2: Any, *, xp: Namespace) -> Array:
    """``sum(w2[n] * relu(w1[n] * x + b1[n]))`` over ``n``, one hidden layer that heads share.

    ``w2`` is per head. A backend may compute many units at a time.
    """
    of_framework = operations_of(xp).network
    if of_framework is not None and isinstance(w2, HeadTable):
        found = of_framework(x, w1, b1, w2.of_all_heads)
        if found is not None:
            return found
    units = (w1[n] * x + b1[n] for n in range(w1.shape[0]))
    return sum(w2[n] * xp.where(unit > 0, unit, 0.0) for n, unit in enumerate(units))
