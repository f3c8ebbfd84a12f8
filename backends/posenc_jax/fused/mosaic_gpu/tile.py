"""A tile of scores inside a kernel for Hopper GPUs: its products, bias, mask and gradient.

A warpgroup holds a tile in registers, in the layout that ``wgmma`` leaves. A weight is ``exp2`` of
a score times ``score_factor``, less the maximum or log-sum-exp of its row in units of ``ln 2``: one
multiply-add. A masked score is ``-inf``. The running maximum of a row starts at the finite
``MIN_SCORE_BASE_2``, so that their difference is never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.mosaic_gpu import namespace
from posenc_jax.fused.mosaic_gpu.jax_version import COLUMN_LAYOUT, ROW_LAYOUT, WGMMA, plgpu
from posenc_jax.fused.plan import MIN_SCORE, Plan, Tokens

LOG2E = math.log2(math.e)
MIN_SCORE_BASE_2 = MIN_SCORE * LOG2E

ROWS = 64  # rows per warpgroup: what one wgmma computes

Shape: TypeAlias = tuple[int, ...]


class TileSide(NamedTuple):
    """Queries or keys of a tile.

    Attributes
    ----------
    axis
        The axis of the tile along which they lie.
    start
        The default position of the first one; for keys this is also its index.
    pos, seg, feature
        One number per token, or None, in the layout of ``axis``.
    """

    axis: int
    start: Any
    pos: Array | None = None
    seg: Array | None = None
    feature: Array | None = None


Bias: TypeAlias = Array | Callable[[TileSide, TileSide, Shape], Array] | None


def products(*pairs: tuple[Any, Any], meanwhile: Callable[[], None] = lambda: None) -> list[Array]:
    """``left @ right.T`` of matrices in shared memory, float32.

    All products start, then ``meanwhile`` runs, then all products are awaited. ``right`` is
    ``(n, D)``, as keys are.
    """
    shapes = [(left.shape[0], right.shape[0]) for left, right in pairs]

    def compute(*sums: Any) -> list[Array]:
        for total, (left, right) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, left, right.transpose((1, 0)))
        meanwhile()
        return [total[...] for total in sums]

    totals: list[Array] = pl.run_scoped(
        compute, *(plgpu.ACC(shape, jnp.float32) for shape in shapes)
    )
    return totals


def left_operand(values: Array, interpreter_scratch: Any) -> Any:
    """Values in registers, as the left side of a product.

    The interpreter multiplies from shared memory only: ``interpreter_scratch`` is a buffer of their
    shape for it, and None on a device.
    """
    if interpreter_scratch is None:
        return values
    interpreter_scratch[...] = values
    plgpu.commit_smem()
    return interpreter_scratch


def plus_product(total: Array, left: Array, right: Any, interpreter_scratch: Any) -> Array:
    """``total + left @ right``: ``left`` as in ``left_operand``, ``right`` in shared memory."""
    operand = left_operand(left, interpreter_scratch)
    if interpreter_scratch is None:

        def add(sums: Any) -> None:
            plgpu.wgmma(sums, operand, right)

        added: Array = pl.run_state(add)(plgpu.ACC.init(total))
        return added

    def compute(sums: Any) -> Array:
        plgpu.wgmma(sums, operand, right)
        product: Array = sums[...]
        return product

    product: Array = pl.run_scoped(compute, plgpu.ACC(total.shape, jnp.float32))
    return total + product


def zeros(rows: int, columns: int | None = None) -> Array:
    """Zeros in registers: a tile, or one number per row."""
    shape, layout = ((rows,), ROW_LAYOUT) if columns is None else ((rows, columns), WGMMA)
    tile: Array = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    return tile


def broadcast(values: Array, axis: int, shape: Shape) -> Array:
    """One number per row (``axis`` 0) or column (``axis`` 1), for every element of a tile."""
    return lax.broadcast_in_dim(values, shape, [axis])


def score_factor(plan: Plan) -> float:
    """What scores of a tile are multiplied by to be in units of ``ln 2``; positive.

    Multiplying late costs nothing. So without a bias, scores stay products of q and k. A negative
    factor would turn the maximum of a row into its minimum.
    """
    if plan.form == "none" and plan.scale > 0:
        return plan.scale * LOG2E
    return LOG2E


def masked_scores(plan: Plan, product: Array, query: TileSide, key: TileSide, bias: Bias) -> Array:
    """Scores of a tile divided by ``score_factor``, ``-inf`` where a pair is masked.

    ``bias`` is a tile, or a function of queries, keys and the shape of the tile.
    """
    shape, factor = product.shape, score_factor(plan)
    scores = product * (plan.scale * LOG2E / factor)
    if callable(bias):
        bias = bias(query, key, shape)
    if bias is not None:
        scores = scores + bias * (LOG2E / factor)

    def apply_mask(scores: Array) -> Array:
        q_pos, k_pos = (_positions(side, shape) for side in (query, key))
        index = _indices(key, shape)
        segments = [
            None if side.seg is None else broadcast(side.seg, side.axis, shape)
            for side in (query, key)
        ]
        mask = plan.mask(q_pos, k_pos, index, *segments)
        if mask is None:  # a window without bounds
            return scores
        return jnp.where(mask, scores, -jnp.inf)

    needs_mask = plan.needs_mask(
        query.start, shape[query.axis], key.start, shape[key.axis],
        has_segments=query.seg is not None,
    )  # fmt: skip
    if needs_mask is False:
        return scores
    if needs_mask is True:
        return apply_mask(scores)
    result: Array = lax.cond(needs_mask, apply_mask, lambda scores: scores, scores)
    return result


def softmax_weights(plan: Plan, scores: Array, logsumexp: Array, axis: int) -> Array:
    """Weights of a tile, from the log-sum-exp per query in units of ``ln 2``, along ``axis``."""
    return jnp.exp2(scores * score_factor(plan) - broadcast(logsumexp, axis, scores.shape))


def softmax_gradient(weights: Array, d_weights: Array, delta: Array, axis: int) -> Array:
    """Gradient of the scores of a tile; ``delta`` is one number per query, along ``axis``."""
    return weights * (d_weights - broadcast(delta, axis, weights.shape))


def tile_gradient(
    plan: Plan, scores: Array, d_weights: Array, logsumexp: Array, delta: Array
) -> Array:
    """Gradient of the scores of a tile with queries as rows."""
    return softmax_gradient(softmax_weights(plan, scores, logsumexp, 0), d_weights, delta, 0)


def bias_tokens(plan: Plan, query: TileSide, key: TileSide, shape: Shape) -> tuple[Tokens, Tokens]:
    """What the bias reads of the query and of the key of each pair of a tile."""
    at_query, at_key = (
        Tokens(
            bias_positions(plan, _positions(side, shape)),
            None if side.feature is None else broadcast(side.feature, side.axis, shape),
        )
        for side in (query, key)
    )
    return at_query, at_key


def bias_positions(plan: Plan, positions: Array) -> Array:
    """Positions on a tile as a bias reads them.

    Those as float32 are converted once per row and column, which stay in registers. Features do
    too, and beside them there are too few registers for positions.
    """
    as_floats = plan.reads.float_positions and not (plan.reads.query or plan.reads.key)
    return positions.astype(jnp.float32) if as_floats else positions


def bias_function(
    plan: Plan, head_scalars: Sequence[Array]
) -> Callable[[TileSide, TileSide, Shape], Array] | None:
    """The scheme's elementwise bias for one head, less ``row_term``; None for other forms."""
    if plan.form != "elementwise":
        return None

    def bias(query: TileSide, key: TileSide, shape: Shape) -> Array:
        if not plan.reads.by_key:
            return plan.bias(head_scalars, *bias_tokens(plan, query, key, shape), namespace)
        ahead = _indices(key._replace(start=key.start - query.start), shape)
        return plan.key_bias(head_scalars, bias_positions(plan, ahead), namespace)

    return bias


def row_term(plan: Plan, head_scalars: Sequence[Array], axis: int, count: int) -> Array | None:
    """What ``bias_function`` leaves out of all scores of a query, in units of ``ln 2``.

    One number for each of the ``count`` queries of a tile, along an axis. None if it leaves out
    nothing.
    """
    if not plan.reads.by_key:
        return None
    layout = COLUMN_LAYOUT if axis else ROW_LAYOUT
    at = bias_positions(plan, plgpu.layout_cast(lax.iota(jnp.int32, count), layout))
    zero = jnp.zeros_like(at)
    first_key = plan.key_bias(head_scalars, zero, namespace)
    return (plan.bias(head_scalars, Tokens(at), Tokens(zero), namespace) - first_key) * LOG2E


def d_by_scalar(plan: Plan, head_scalars: Sequence[Array], n: int, q: Tokens, k: Tokens) -> Array:
    """The derivative of the bias with respect to the ``n``-th per-head scalar, on a tile."""

    def bias(scalar: Array) -> Array:
        return plan.bias([*head_scalars[:n], scalar, *head_scalars[n + 1 :]], q, k, namespace)

    return _derivative(bias, head_scalars[n])


def d_by_feature(
    plan: Plan,
    head_scalars: Sequence[Array],
    q: Tokens,
    k: Tokens,
    of: Literal["query", "key"],
) -> Array:
    """The derivative of the bias with respect to the feature of one side, on a tile."""

    def bias(feature: Array) -> Array:
        if of == "query":
            return plan.bias(head_scalars, q._replace(feature=feature), k, namespace)
        return plan.bias(head_scalars, q, k._replace(feature=feature), namespace)

    feature = (q if of == "query" else k).feature
    assert feature is not None
    return _derivative(bias, feature)


def _derivative(function: Callable[[Array], Array], at: Array) -> Array:
    """The derivative of an elementwise function of one array."""
    tangent: Array = jax.jvp(function, (at,), (jnp.ones_like(at),))[1]
    return tangent


def keep_apart(values: Any) -> Any:
    """The same arrays, which the compiler neither merges nor moves across this place."""
    return lax.optimization_barrier(values)  # type: ignore[no-untyped-call]  # untyped in JAX


def recompute(side: TileSide) -> TileSide:
    """The same side behind a barrier, so that the compiler recomputes what depends on it.

    Keeping results of an earlier use would take too many registers.
    """
    start = keep_apart(side.start)
    pos, feature = (None if a is None else keep_apart(a) for a in (side.pos, side.feature))
    return side._replace(start=start, pos=pos, feature=feature)


def _indices(side: TileSide, shape: Shape) -> Array:
    index: Array = side.start + plgpu.broadcasted_iota(jnp.int32, shape, side.axis, layout=WGMMA)
    return index


def _positions(side: TileSide, shape: Shape) -> Array:
    if side.pos is not None:
        return broadcast(side.pos, side.axis, shape)
    return _indices(side, shape)
