"""What kernels for TPUs compute on one tile: a block of queries against a block of keys.

Scores are in units of ``ln 2``, so that ``exp2`` gives the weights: ``exp`` would multiply each
score once more. So are the tables and the log-sum-exp that kernels read.

A tile has queries or keys along its rows. Numbers per token lie in memory as a row ``(1, n)``,
which has no padding. For the tokens along the rows of a tile they are turned into a column.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.fused.plan import MASK_VALUE, Plan, Tokens

LANES, SUBLANES = 128, 8  # of a register
LOG2E = math.log2(math.e)


class TileKind(NamedTuple):
    """What kind of tile is computed.

    Attributes
    ----------
    masked
        Whether a pair may be masked.
    far
        The bias of a far tile, a scalar; None for a near one and other forms of bias. Scores are
        without it: it is added to their maximum, and subtracted from the log-sum-exp.
    is_before
        Whether a far tile is before the near ones; or None.
    """

    masked: bool
    far: Any = None
    is_before: Any = None


class TileTokens(NamedTuple):
    """Queries and keys of a tile: those of one side as a column, those of the other as a row."""

    q_pos: Array
    k_pos: Array
    k_index: Array
    q_seg: Array | None
    k_seg: Array | None
    q_feature: Array | None
    k_feature: Array | None

    def query(self, plan: Plan) -> Tokens:
        """What a bias reads of the queries."""
        return Tokens(_bias_positions(plan, self.q_pos), self.q_feature)

    def key(self, plan: Plan) -> Tokens:
        """What a bias reads of the keys."""
        return Tokens(_bias_positions(plan, self.k_pos), self.k_feature)


def _bias_positions(plan: Plan, positions: Array) -> Array:
    """A row or column of positions as a bias reads them."""
    return positions.astype(jnp.float32) if plan.reads.float_positions else positions


def to_column(row: Array) -> Array:
    """``(1, n)`` as ``(n, LANES)``, each number in all lanes of its row."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def to_row(column: Array) -> Array:
    """``(n, 1)`` as ``(1, n)``."""
    return jnp.transpose(jnp.broadcast_to(column, (column.shape[0], LANES)))[:1]


def across(column: Array, width: int) -> Array:
    """``(n, width)`` from ``(n, LANES)`` with one number in all lanes of a row.

    It only names registers again, where a broadcast of ``(n, 1)`` permutes the lanes of each.
    """
    return jnp.concatenate([column] * -(-width // LANES), axis=1)[:, :width]


def lane_sums(tile: Array) -> Array:
    """``(n, LANES)``: the sums of rows, but for those over lanes, which are left for the end."""
    padded = jnp.pad(tile, ((0, 0), (0, -tile.shape[1] % LANES)))
    parts = jnp.split(padded, padded.shape[1] // LANES, axis=1)
    return functools.reduce(operator.add, parts)


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


def iota(start: Array, size: int, axis: int) -> Array:
    """``start, start + 1, ...`` along an axis, ``(size, 1)`` or ``(1, size)``, int32."""
    shape = (size, 1) if axis == 0 else (1, size)
    return lax.broadcasted_iota(jnp.int32, shape, axis) + start


def masked_scores(
    plan: Plan,
    scores: Array,
    tokens: TileTokens,
    head_scalars: Sequence[Array],
    table: Array | None,
    *,
    masked: bool,
) -> Array:
    """Scores of a tile from ``q @ k.T``; ``MASK_VALUE`` where masked, ``-inf`` if the bias is.

    They are in units of ``ln 2``, and so is ``table``.

    ``masked`` is whether a pair of the tile may be masked.
    """
    scores = scores * (plan.scale * LOG2E)
    if plan.form == "elementwise":
        bias = plan.bias(head_scalars, tokens.query(plan), tokens.key(plan))
        scores = scores + bias * LOG2E
    if table is not None:
        scores = scores + table
    if not masked:
        return scores
    mask = plan.mask(tokens.q_pos, tokens.k_pos, tokens.k_index, tokens.q_seg, tokens.k_seg)
    return scores if mask is None else jnp.where(mask, scores, MASK_VALUE)


def without_far(per_query: Array, kind: TileKind) -> Array:
    """A number to subtract from scores, for scores that are without the bias of a far tile."""
    return per_query if kind.far is None else per_query - kind.far


def tile_gradient(
    scores: Array, d_weights: Array, logsumexp: Array, delta: Array
) -> tuple[Array, Array]:
    """Weights of a tile, and the gradient of its scores."""
    weights = jnp.exp2(scores - logsumexp)
    return weights, weights * (d_weights - delta)


def bias_derivatives(
    plan: Plan, tokens: TileTokens, head_scalars: Sequence[Array], side: Literal["query", "key"]
) -> list[Array]:
    """Those derivatives of the bias on a tile that the kernel for one side sums.

    For queries: with respect to each trainable per-head scalar, and to their feature. For keys:
    with respect to their feature. Each is computed in forward mode: a bias is elementwise, so it is
    one tile. The compiler shares common parts.
    """
    q, k = tokens.query(plan), tokens.key(plan)
    derivatives = []
    if side == "query":
        for n in range(len(plan.reads.trainable)):

            def by_scalar(x: Array, n: int = n) -> Array:
                return plan.bias([*head_scalars[:n], x, *head_scalars[n + 1 :]], q, k)

            derivatives.append(_derivative(by_scalar, head_scalars[n]))
        if q.feature is not None:

            def by_query(x: Array) -> Array:
                return plan.bias(head_scalars, q._replace(feature=x), k)

            derivatives.append(_derivative(by_query, q.feature))
    elif k.feature is not None:

        def by_key(x: Array) -> Array:
            return plan.bias(head_scalars, q, k._replace(feature=x))

        derivatives.append(_derivative(by_key, k.feature))
    return derivatives


def toeplitz(low: Array, high: Array, *, shift: int) -> Array:
    """The tile ``(n, n)`` of ``w[n - shift + column - row]``; ``w`` joins two rows ``(1, n)``.

    Row ``i`` is ``w`` rotated by ``i``. Rows are doubled again and again: each doubling rotates all
    rows by their number. So almost all rotations are by whole registers.
    """
    size = low.shape[1]
    line = jnp.concatenate([low, high], axis=1)
    rows = jnp.broadcast_to(line, (SUBLANES, 2 * size))
    if shift:
        rows = _rotate(rows, shift)
    index = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    for bit in _bits():
        rows = jnp.where(index & bit != 0, _rotate(rows, bit), rows)
    while rows.shape[0] < size:
        rows = jnp.concatenate([rows, _rotate(rows, rows.shape[0])], axis=0)
    return rows[:, size:]


def diagonal_sums(tile: Array) -> Array:
    """``(1, 2 n)``: entry ``x`` is the sum where ``column - row == x - (n - 1)``.

    The transpose of ``toeplitz``: the upper half of the rows is rotated and added to the lower.
    """
    rows = jnp.concatenate([tile, jnp.zeros_like(tile)], axis=1)
    while (half := rows.shape[0] // 2) >= SUBLANES:
        rows = _rotate(rows[:half], half) + rows[half:]
    index = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    for bit in _bits():
        rows = jnp.where(index & bit == 0, _rotate(rows, bit), rows)
    return jnp.sum(rows, axis=0, keepdims=True)


def _rotate(rows: Array, by: int) -> Array:
    """Every number ``by`` columns further, the last ones at the front."""
    shift: Any = np.int32(by)  # 32 bits, also under jax_enable_x64
    rotated: Array = pltpu.roll(rows, shift, 1)
    return rotated


def _bits() -> list[int]:
    return [1 << n for n in range(SUBLANES.bit_length() - 1)]


def _derivative(function: Callable[[Any], Array], x: Array) -> Array:
    tangent: Array = jax.jvp(function, (x,), (jnp.ones_like(x),))[1]
    return tangent
