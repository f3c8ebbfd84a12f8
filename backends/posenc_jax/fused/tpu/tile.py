"""What kernels for TPUs compute on one tile: a block of queries against a block of keys.

A tile has queries or keys along its rows. A number of each token is a row ``(1, n)`` in memory,
where it takes no padding, and must become a column for the tokens along the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.fused.plan import HIDDEN, Plan, Tokens

LANES, SUBLANES = 128, 8  # of a register


class At(NamedTuple):
    """Where a tile stands: of its queries and its keys, one as a column, the other as a row."""

    q_pos: Array
    k_pos: Array
    k_index: Array
    q_seg: Array | None
    k_seg: Array | None
    q_feature: Array | None
    k_feature: Array | None


def column(row: Array) -> Array:
    """``(1, n)`` as ``(n, LANES)``, a number in all lanes of its row."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def row(column: Array) -> Array:
    """``(n, 1)`` as ``(1, n)``."""
    return jnp.transpose(jnp.broadcast_to(column, (column.shape[0], LANES)))[:1]


def product(left: Array, right: Array, *, transposed: bool = False) -> Array:
    """``left @ right``, or ``left @ right.T``, in float32; float32 factors are not rounded."""
    exact = lax.Precision.HIGHEST if right.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = ((1,), (1 if transposed else 0,))
    return lax.dot_general(
        left.astype(right.dtype),
        right,
        (contracted, ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def steps(start: Array, size: int, axis: int) -> Array:
    """``start, start + 1, ...`` along an axis, ``(size, 1)`` or ``(1, size)``, int32."""
    shape = (size, 1) if axis == 0 else (1, size)
    return lax.broadcasted_iota(jnp.int32, shape, axis) + start


def scored(
    plan: Plan, scores: Array, at: At, numbers: Sequence[Array], table: Array | None
) -> Array:
    """Scores with their bias; what may not be seen is ``HIDDEN``, or ``-inf`` by its bias."""
    scores = scores * plan.scale
    if plan.form == "pairs":
        scores = scores + plan.bias(numbers, *_asked(at))
    if table is not None:
        scores = scores + table
    seen = plan.seen(at.q_pos, at.k_pos, at.k_index, at.q_seg, at.k_seg)
    return scores if seen is None else jnp.where(seen, scores, HIDDEN)


def slopes(plan: Plan, at: At, numbers: Sequence[Array], side: str) -> list[Array]:
    """Derivatives of the bias on a tile: by learned numbers and queries' feature, or by the keys'.

    Forward mode, one at a time: a bias is elementwise, so that each is one tile. They share what
    the compiler finds common.
    """
    q, k = _asked(at)
    found = []
    if side == "queries":
        for n in range(len(plan.learned)):

            def of_number(x: Array, n: int = n) -> Array:
                return plan.bias([*numbers[:n], x, *numbers[n + 1 :]], q, k)

            found.append(_derivative(of_number, numbers[n]))
        if q.feature is not None:
            found.append(
                _derivative(lambda x: plan.bias(numbers, q._replace(feature=x), k), q.feature)
            )
    elif k.feature is not None:
        found.append(_derivative(lambda x: plan.bias(numbers, q, k._replace(feature=x)), k.feature))
    return found


def toeplitz(low: Array, high: Array, *, shift: int) -> Array:
    """The tile ``(n, n)`` of ``w[n - shift + column - row]``, ``w`` being rows ``(1, n)`` joined.

    Row ``i`` is ``w`` moved by ``i``: doubled again and again, and moved by as many rows as there
    are; so almost all moves are by whole registers.
    """
    size = low.shape[1]
    line = jnp.concatenate([low, high], axis=1)
    rows = jnp.broadcast_to(line, (SUBLANES, 2 * size))
    if shift:
        rows = _moved(rows, shift)
    index = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    for bit in _bits():
        rows = jnp.where(index & bit != 0, _moved(rows, bit), rows)
    while rows.shape[0] < size:
        rows = jnp.concatenate([rows, _moved(rows, rows.shape[0])], axis=0)
    return rows[:, size:]


def diagonal_sums(tile: Array) -> Array:
    """``(1, 2 n)``: entry ``x`` is the sum where ``column - row == x - (n - 1)``.

    The transpose of ``toeplitz``: the upper half of the rows is moved and added to the lower.
    """
    rows = jnp.concatenate([tile, jnp.zeros_like(tile)], axis=1)
    while (half := rows.shape[0] // 2) >= SUBLANES:
        rows = _moved(rows[:half], half) + rows[half:]
    index = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    for bit in _bits():
        rows = jnp.where(index & bit == 0, _moved(rows, bit), rows)
    return jnp.sum(rows, axis=0, keepdims=True)


def _moved(rows: Array, by: int) -> Array:
    """Every number so many columns on, the last ones to the front."""
    moved: Array = pltpu.roll(rows, np.int32(by), 1)  # 32 bits, also under jax_enable_x64
    return moved


def _bits() -> list[int]:
    return [1 << n for n in range(SUBLANES.bit_length() - 1)]


def _asked(at: At) -> tuple[Tokens, Tokens]:
    """What a bias reads of both sides."""
    return Tokens(at.q_pos, at.q_feature), Tokens(at.k_pos, at.k_feature)


def _derivative(function: Callable[[Any], Array], x: Array) -> Array:
    tangent: Array = jax.jvp(function, (x,), (jnp.ones_like(x),))[1]
    return tangent
