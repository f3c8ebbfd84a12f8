"""A tile of scores inside a kernel for Hopper GPUs: products, the bias on them, what is seen.

A warpgroup holds a tile in registers as ``wgmma`` leaves it there. Scores are in units of
``ln 2``, so that one ``exp2`` makes a weight of them. What may not be seen is ``-inf``; no row
starts below ``MIN_POSITION``, which is finite, so that no difference of the two is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.mosaic_gpu import namespace
from posenc_jax.fused.mosaic_gpu.jax_version import OF_ROWS, WGMMA, plgpu
from posenc_jax.fused.plan import FLOOR, Plan, Tokens

LOG2E = math.log2(math.e)
MIN_POSITION = FLOOR * LOG2E

ROWS = 64  # of a warpgroup: what one wgmma computes


class Side(NamedTuple):
    """Queries or keys of a tile.

    Attributes
    ----------
    axis
        The axis of the tile along which they lie.
    start
        The position of the first where positions are the default; of keys it is the index.
    pos, seg, feature
        One number each, or None, in the layout of ``axis``.
    """

    axis: int
    start: Any
    pos: Array | None = None
    seg: Array | None = None
    feature: Array | None = None


def products(*pairs: tuple[Any, Any], meanwhile: Callable[[], None] = lambda: None) -> list[Array]:
    """``left @ right.T`` of matrices in shared memory, float32, all started before one is awaited.

    ``right`` is ``(n, D)`` as keys are; ``meanwhile`` is done before the first is awaited.
    """
    shapes = [(left.shape[0], right.shape[0]) for left, right in pairs]

    def compute(*sums: Any) -> list[Array]:
        for total, (left, right) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, left, right.transpose((1, 0)))
        meanwhile()
        return [total[...] for total in sums]

    return pl.run_scoped(compute, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def plus_product(total: Array, left: Array, right: Any, spare: Any) -> Array:
    """``total + left @ right``: ``left`` in registers, ``right`` in shared memory.

    ``spare`` is shared memory of the shape of ``left`` for the interpreter, which multiplies from
    there only; None on a device.
    """
    if spare is None:

        def add(sums: Any) -> None:
            plgpu.wgmma(sums, left, right)

        return pl.run_state(add)(plgpu.ACC.init(total))
    spare[...] = left
    plgpu.commit_smem()

    def compute(sums: Any) -> Array:
        plgpu.wgmma(sums, spare, right)
        return sums[...]

    return total + pl.run_scoped(compute, plgpu.ACC(total.shape, jnp.float32))


def zeros(rows: int, columns: int | None = None) -> Array:
    """Zeros in registers: of a tile, or one a row."""
    if columns is None:
        return plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), OF_ROWS)
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), WGMMA)


def spread(values: Array, axis: int, shape: tuple[int, int]) -> Array:
    """One number a row (``axis`` 0) or column, for every element of a tile."""
    return lax.broadcast_in_dim(values, shape, [axis])


def scores(
    plan: Plan,
    product: Array,
    query: Side,
    key: Side,
    bias: Array | Callable[[Tokens, Tokens], Array] | None,
) -> Array:
    """Scores of a tile in units of ``ln 2``, ``-inf`` where nothing may be seen.

    ``bias``: its values, or a function of queries and keys.
    """
    shape = product.shape
    found = product * (plan.scale * LOG2E)
    if callable(bias):
        bias = bias(*tokens(plan, query, key, shape))
    if bias is not None:
        found = found + bias * LOG2E

    def masked(found: Array) -> Array:
        q_pos, k_pos = (_positions(plan, side, shape) for side in (query, key))
        index = _indices(key, shape)
        segments = [
            None if side.seg is None else spread(side.seg, side.axis, shape)
            for side in (query, key)
        ]
        seen = plan.seen(q_pos, k_pos, index, *segments)
        if seen is None:  # a window without bounds
            return found
        return jnp.where(seen, found, -jnp.inf)

    partial = _may_hide(plan, query, key, shape)
    if partial is False:
        return found
    if partial is True:
        return masked(found)
    return lax.cond(partial, masked, lambda found: found, found)


def tokens(plan: Plan, query: Side, key: Side, shape: tuple[int, int]) -> tuple[Tokens, Tokens]:
    """What the bias of a pair is computed from, on a tile."""
    query_at, key_at = (
        Tokens(
            _positions(plan, side, shape),
            None if side.feature is None else spread(side.feature, side.axis, shape),
        )
        for side in (query, key)
    )
    return query_at, key_at


def bias_of(plan: Plan, numbers: Sequence[Array]) -> Callable[[Tokens, Tokens], Array] | None:
    """The scheme's bias on a tile for one head; None if it has none, or comes as a table."""
    if plan.form != "pairs":
        return None
    return lambda q, k: plan.bias(numbers, q, k, namespace)


def by_number(plan: Plan, numbers: Sequence[Array], n: int, q: Tokens, k: Tokens) -> Array:
    """The derivative of the bias by its ``n``-th number, on a tile."""

    def bias(number: Array) -> Array:
        return plan.bias([*numbers[:n], number, *numbers[n + 1 :]], q, k, namespace)

    return derivative(bias, numbers[n])


def by_feature(
    plan: Plan, numbers: Sequence[Array], q: Tokens, k: Tokens, of: Literal["query", "key"]
) -> Array:
    """The derivative of the bias by the feature of queries or of keys, on a tile."""
    if of == "query":
        return derivative(
            lambda x: plan.bias(numbers, q._replace(feature=x), k, namespace), q.feature
        )
    return derivative(lambda x: plan.bias(numbers, q, k._replace(feature=x), namespace), k.feature)


def derivative(function: Callable[[Array], Array], at: Array) -> Array:
    """Of a function of one array, elementwise."""
    return jax.jvp(function, (at,), (jnp.ones_like(at),))[1]


def apart(side: Side) -> Side:
    """The same, for the compiler another: what is computed from both is computed twice.

    Kept instead, it would take the registers that there are.
    """
    start = lax.optimization_barrier(side.start)
    pos, feature = (
        None if a is None else lax.optimization_barrier(a) for a in (side.pos, side.feature)
    )
    return side._replace(start=start, pos=pos, feature=feature)


def _indices(side: Side, shape: tuple[int, int]) -> Array:
    return side.start + plgpu.broadcasted_iota(jnp.int32, shape, side.axis, layout=WGMMA)


def _positions(plan: Plan, side: Side, shape: tuple[int, int]) -> Array:
    if side.pos is not None:
        return spread(side.pos, side.axis, shape)
    return _indices(side, shape)


def _may_hide(plan: Plan, query: Side, key: Side, shape: tuple[int, int]) -> Any:
    """Whether a tile has a hidden pair: known here, or a scalar of the kernel."""
    padded = key.start + shape[key.axis] > plan.k_len if plan.hides_padding else False
    left, right = plan.window or (None, None)
    if plan.causal and right is not None and right >= 0:
        right = None  # what is ahead is hidden anyway
    masks = plan.causal or left is not None or right is not None
    if query.seg is not None or (query.pos is not None and masks):
        return True
    if not masks:
        return padded
    least = query.start - (key.start + shape[key.axis] - 1)  # of query less key
    most = query.start + shape[query.axis] - 1 - key.start
    terms = [padded] if plan.hides_padding else []
    if plan.causal and right is None:
        terms.append(least < 0)
    if left is not None:
        terms.append(most > left)
    if right is not None:
        terms.append(least < -right)
    return _either(terms)


def _either(terms: Sequence[Any]) -> Any:
    found = terms[0]
    for term in terms[1:]:
        found = found | term
    return found
