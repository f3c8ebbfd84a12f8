"""The tables of a ``Rotary``, checked against the vectors that they turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from posenc.contract.operations import device
from posenc.contract.protocol import Array, Namespace, PositionScheme, Role
from posenc.contract.tokens import Rotary
from posenc.positions.integers import from_numpy


def check_rotary(rotary: Any, scheme: PositionScheme, role: Role) -> Rotary:
    """``rotary``, if it was made for this scheme."""
    name = _name(role)
    if not isinstance(rotary, Rotary):
        kind = type(rotary).__name__
        raise TypeError(f"{name} must come from posenc.rotary(scheme, pos), got {kind}")
    if rotary.scheme is not scheme and rotary.scheme != scheme:
        raise ValueError(f"{name} was made for {rotary.scheme}, but the scheme is {scheme}")
    return rotary


def rotary_tables(
    rotary: Any, scheme: PositionScheme, x: Array, role: Role, xp: Namespace
) -> dict[str, Array]:
    """The tables of a ``Rotary``, which then broadcast to ``x (..., L, D)``.

    Raises
    ------
    TypeError, ValueError
        It was made for another scheme, other lengths or batches, or for another dtype.
    """
    tables = check_rotary(rotary, scheme, role).tables
    work = xp.float64 if x.dtype == xp.float64 else xp.float32
    return {name: _fit(table, x, work, role, xp) for name, table in tables.items()}


def _fit(table: Array, x: Array, work: Any, role: Role, xp: Namespace) -> Array:
    """A table ``(L, n)``, ``(H, L, n)`` or ``(B, H or 1, L, n)`` that broadcasts to ``x``."""
    if isinstance(table, np.ndarray):
        table = from_numpy(table, xp=xp, device=device(x))
    if table.dtype != work:
        raise ValueError(
            f"{_name(role)} holds {table.dtype}, but {x.dtype} is transformed in {work}; give "
            "posenc.rotary the dtype of queries and keys"
        )
    shape, own = tuple(table.shape), tuple(x.shape)
    if len(shape) == 4 and len(own) == 3 and shape[1] == 1:  # x (B, L, D)
        shape = (shape[0], *shape[2:])
    elif len(shape) == 4 and len(own) > 4:
        shape = (shape[0], *[1] * (len(own) - 4), *shape[1:])
    lead, of_x = shape[:-2], own[:-2]
    # Compared one by one: torch's compiler answers "in" wrongly for symbols.
    fits = len(lead) <= len(of_x) and shape[-2] == own[-2]
    for size, size_of_x in zip(reversed(lead), reversed(of_x), strict=False):
        fits = fits and (size == 1 or size == size_of_x)
    if not fits:
        why = "it was made for other positions"
        if lead and of_x and shape[-2] == own[-2] and lead[-1] not in (1, of_x[-1]):
            why = f"each of {lead[-1]} heads has angles of its own, and x has {of_x[-1]}"
            why += "; repeat k and v" if role == "key" else ""
        raise ValueError(
            f"{_name(role)} holds tables {tuple(table.shape)}, which do not fit x {own}: {why}"
        )
    return table if shape == tuple(table.shape) else xp.reshape(table, shape)


def _name(role: Role) -> str:
    return "rotary of queries" if role == "query" else "rotary of keys"
