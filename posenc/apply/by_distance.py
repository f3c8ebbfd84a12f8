"""A table by distance, read at every pair of positions.

A bias that depends on distance alone has ``Q K`` values per head. If positions are consecutive,
only ``Q + K - 1`` of them differ, and each row is the row before, shifted by one. Then nothing is
computed or gathered per pair. At other positions the table is read by index.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_jax_namespace

from posenc.contract.operations import is_compiling, operations_of
from posenc.contract.protocol import Array, Namespace
from posenc.contract.tables import HeadTable
from posenc.positions.integers import concrete_values

# With fewer pairs, other parts of a call take longer. With fewer pairs per distance, a table saves
# little.
_MANY, _PER_DISTANCE = 2**14, 4
_BLOCK = 16  # rows


class Distances(NamedTuple):
    """The distances ``lowest .. lowest + size - 1``; those of all pairs are among them.

    ``consecutive``: positions of queries rise by one from each to the next, and so do those of
    keys.
    """

    lowest: int
    size: int
    consecutive: bool

    def at_pairs(self, table: Array, q: Array, k: Array, *, xp: Namespace) -> Array:
        """``table[..., k - q - lowest]`` as an array of its own.

        ``table`` is ``(H, size)`` for ``q (1, Q, 1)`` and ``k (1, 1, K)``, and the result is
        ``(H, Q, K)``. With one more axis before ``q`` and ``k``, ``(B or 1, 1, Q, 1)``, it is
        ``(B or 1, H, Q, K)``.
        """
        if not self.consecutive:
            return HeadTable(table, xp)[k - q - self.lowest]
        table = xp.reshape(table, (*q.shape[:-3], *table.shape))
        unfold = operations_of(xp).unfold
        return _unfold(table, q.shape[-2], xp) if unfold is None else unfold(table, q.shape[-2])


def distances_of_pairs(
    q: Array, k: Array, *, in_order: bool, linear: bool, xp: Namespace
) -> Distances | None:
    """The distances of all pairs, where reading a table of them is faster than the pairs.

    None too if positions are unknown, as in a traced program, or if a compiler makes the bias part
    of other operations.

    Parameters
    ----------
    q, k
        Positions ``(..., Q, 1)`` and ``(..., 1, K)``.
    in_order
        Whether they are known to be ``K - Q .. K - 1`` and ``0 .. K - 1``.
    linear
        Whether the bias is linear in distance, which costs no more than reading it by index.
    """
    rows, columns = q.shape[-2], k.shape[-1]
    if is_compiling(xp) or not (isinstance(rows, int) and isinstance(columns, int)):
        return None
    pairs, fewest = rows * columns, rows + columns - 1
    if pairs < _MANY or pairs < _PER_DISTANCE * fewest:
        return None
    own = operations_of(xp).unfold is not None
    q_values, k_values = concrete_values(q, xp), concrete_values(k, xp)
    if q_values is None or k_values is None:
        known = in_order and own and not linear
        return Distances(1 - columns, fewest, consecutive=True) if known else None
    lowest = int(k_values.min()) - int(q_values.max())
    size = int(k_values.max()) - int(q_values.min()) - lowest + 1
    # In a program for XLA, the slices of _unfold take seconds to compile.
    may_unfold = own or not is_jax_namespace(xp)
    if may_unfold and _rises_by_one(q_values, rows) and _rises_by_one(k_values, columns):
        return Distances(lowest, size, consecutive=True)
    if linear or pairs < _PER_DISTANCE * size:
        return None
    return Distances(lowest, size, consecutive=False)


def _rises_by_one(positions: np.ndarray[Any, Any], length: int) -> bool:
    """Whether positions are those of one sequence, each the one before plus 1."""
    return positions.size == length and bool((np.diff(positions.reshape(-1)) == 1).all())


def _unfold(table: Array, rows: int, xp: Namespace) -> Array:
    """``(..., rows, K)`` from ``(..., rows + K - 1)``: row ``i``, column ``j`` is at distance
    ``rows - 1 - i + j`` from the first.

    A few rows are made one after another. Slices of them are all the others: for libraries that
    copy a slice without gathering.
    """
    columns = table.shape[-1] - rows + 1
    block, size = table[..., None, :], 1
    while 2 * size <= min(_BLOCK, rows):
        block = xp.concat([block[..., size:], block[..., : block.shape[-1] - size]], axis=-2)
        size *= 2
    slices = []
    for left in range(rows, 0, -size):  # rows that are not made yet
        first = max(0, left - size)
        slices.append(block[..., max(0, size - left) :, first : first + columns])
    return xp.concat(slices, axis=-2)
