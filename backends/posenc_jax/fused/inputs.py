"""What kernels are given: the plan of a call, and its arrays in whole blocks."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from posenc.backend import Call, bias_by_distance, near_diagonals
from posenc_jax.fused.plan import Form, Integers, Operands, Plan
from posenc_jax.fused.reads import BiasReads
from posenc_jax.needed import first_and_end, needed_pairs


def inputs_of(
    call: Call, form: Form, reads: BiasReads, block: int, *, reads_far: bool
) -> tuple[Plan, Operands, Integers]:
    """The static part and the arrays of a call whose bias has the given form, and reads that.

    ``reads_far`` is whether kernels read ``Operands.far``; if not, no tile is far.
    """
    every = 1 - -(-call.q.shape[2] // block), -(-call.k.shape[2] // block)
    near = near_diagonals(call, block) if reads_far and form == "by distance" else every
    plan = Plan(
        scheme=call.scheme,
        form=form,
        reads=reads,
        causal=call.causal,
        window=call.window,
        first_tokens=call.mask.first_tokens,
        scale=call.scale,
        aligned=call.aligned,
        q_len=call.q.shape[2],
        k_len=call.k.shape[2],
        block=block,
        near=near,
    )
    operands = Operands(
        q=_pad(call.q, block, axis=2),
        k=_pad(call.k, block, axis=2),
        v=_pad(call.v, block, axis=2),
        head_scalars=_stack_scalars(call, plan),
        table=_table(call, plan) if form == "by distance" else None,
        far=_far(call) if plan.has_far else None,
        q_feature=_feature(call, call.query.features, reads.q_feature, block),
        k_feature=_feature(call, call.key.features, reads.k_feature, block),
    )
    key_ranges, query_ranges = needed_blocks(call, block)
    # Padding repeats the last position, which exists, as the ranges of blocks assume.
    integers = Integers(
        q_pos=None if call.aligned else _as_rows(call, call.query.pos, block),
        k_pos=None if call.aligned else _as_rows(call, call.key.pos, block),
        q_seg=None if call.query.seg is None else _as_rows(call, call.query.seg, block),
        k_seg=None if call.key.seg is None else _as_rows(call, call.key.seg, block),
        key_ranges=key_ranges,
        query_ranges=query_ranges,
    )
    return plan, operands, integers


def needed_blocks(call: Call, block: int) -> tuple[Array, Array]:
    """Ranges of key blocks per block of queries, and of query blocks per block of keys.

    As in ``Integers``. All visible pairs that are not negligible lie in these ranges. With sink
    tokens and a window, so do the blocks between the two, which are computed and masked.
    """
    needed = needed_pairs(call, block)
    batch, heads = call.q.shape[:2]
    q_blocks, k_blocks = needed.shape[2:]
    key_ranges = _ranges(needed, (batch, heads, q_blocks))
    query_ranges = _ranges(jnp.swapaxes(needed, 2, 3), (batch, heads, k_blocks))
    return key_ranges, query_ranges


def _ranges(needed: Array, shape: tuple[int, ...]) -> Array:
    """``first_and_end`` with all axes: ``(2, *shape)``."""
    return jnp.broadcast_to(first_and_end(needed), (2, *shape))


def _stack_scalars(call: Call, plan: Plan) -> Array | None:
    """``(H, P)`` float32; see ``Operands.head_scalars``."""
    heads = call.q.shape[1]
    if plan.form != "elementwise":
        return None
    columns = [jnp.broadcast_to(call.arrays[name], (heads,)) for name in plan.reads.scalars]
    return jnp.stack(columns or [jnp.zeros(heads)], axis=-1).astype(jnp.float32)


def _feature(
    call: Call, features: Mapping[str, Array], name: str | None, block: int
) -> Array | None:
    """``(B, H, L)`` float32, padded."""
    if name is None:
        return None
    feature = features[name].astype(jnp.float32)
    feature = jnp.broadcast_to(feature, (*call.q.shape[:2], feature.shape[2]))
    return _pad(feature, block, axis=2, mode="edge")


def _table(call: Call, plan: Plan) -> Array:
    """The bias on near diagonals; see ``Operands.table``."""
    (first, end), block, heads = plan.near, plan.block, call.q.shape[1]
    ahead = plan.k_len - plan.q_len
    between = (first - 1) * block + 1 - ahead, end * block - ahead
    values: Array | None = bias_by_distance(call, between=between)
    assert values is not None
    return jnp.broadcast_to(values, (heads, values.shape[1])).reshape(heads, -1, block)


def _far(call: Call) -> Array:
    """The bias of far tiles; see ``Operands.far``."""
    columns = []
    for end, sign in zip(call.scheme.constant_beyond(), (-1, 1), strict=True):
        at = 0 if end is None else sign * end  # without an end, no tile reads the number
        value: Array | None = bias_by_distance(call, between=(at, at))
        assert value is not None
        columns.append(jnp.broadcast_to(value, (call.q.shape[1], 1)))
    return jnp.concatenate(columns, axis=1)


def _pad(array: Array, block: int, *, axis: int, mode: str = "constant") -> Array:
    """The array with a multiple of ``block`` entries along an axis."""
    missing = -array.shape[axis] % block
    if not missing:
        return array
    widths = [(0, missing if n == axis else 0) for n in range(array.ndim)]
    return jnp.pad(array, widths, mode=mode)


def _as_rows(call: Call, values: Array, block: int) -> Array:
    """Integers ``(L,)`` or ``(B, L)`` as ``(B, L)`` of 32 bits, padded."""
    values = jnp.atleast_2d(values).astype(jnp.int32)
    values = jnp.broadcast_to(values, (call.q.shape[0], values.shape[1]))
    return _pad(values, block, axis=1, mode="edge")
