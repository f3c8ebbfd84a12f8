"""The four kernels for TPUs, from operands in blocks to results in blocks.

Attention under an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), its backward pass
from the log-sum-exp (Dao et al. 2022, arXiv 2205.14135). Each result is summed in one order, so it
is the same every time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.fused.gradients import Rows
from posenc_jax.fused.plan import FLOOR, Operands, Places, Plan
from posenc_jax.fused.tpu.grid import (
    AlongDiagonals,
    Refs,
    Spot,
    UnderKeys,
    UnderQueries,
    Walk,
    launched,
)
from posenc_jax.fused.tpu.tile import (
    LANES,
    At,
    column,
    diagonal_sums,
    product,
    row,
    scored,
    slopes,
    steps,
    toeplitz,
)

_OF_QUERIES = ("q_pos", "q_seg", "q_feature", "logsumexp", "delta")
_OF_KEYS = ("k_pos", "k_seg", "k_feature")


def forward(
    interpreted: bool, plan: Plan, operands: Operands, places: Places
) -> tuple[Array, Array]:
    """Output and log-sum-exp."""
    q, v, n = operands.q, operands.v, plan.block
    found = launched(
        _forward,
        UnderQueries(plan, operands, places),
        given := _given(plan, operands, places),
        {
            "out": jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
            "logsumexp": _numbers(q, 1),
        },
        {
            "columns": _columns(given, _OF_QUERIES, n),
            "out": pltpu.VMEM((n, v.shape[3]), jnp.float32),
            "highest": pltpu.VMEM((n, LANES), jnp.float32),
            "total": pltpu.VMEM((n, LANES), jnp.float32),
        },
        interpreted=interpreted,
    )
    return found["out"], found["logsumexp"][:, :, 0]


def _forward(walk: Walk, spot: Spot, ins: Refs, outs: Refs, scratch: Refs) -> None:
    plan, total, highest = walk.plan, scratch["total"], scratch["highest"]

    @pl.when(spot.is_first)
    def _() -> None:
        _fill(scratch["columns"], ins)
        scratch["out"][...] = jnp.zeros_like(scratch["out"])
        highest[...] = jnp.full_like(highest, FLOOR)
        total[...] = jnp.zeros_like(total)

    @pl.when(spot.needed)
    def _() -> None:
        at, numbers = _at(walk, spot, ins, scratch["columns"]), _numbers_of(walk, spot, ins)
        scores = product(ins["q"][...], ins["k"][...], transposed=True)
        scores = scored(plan, scores, at, numbers, _table(ins, shift=1))
        before = highest[...]
        after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        shrink, weights = jnp.exp(before - after), jnp.exp(scores - after[:, :1])
        highest[...] = after
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        scratch["out"][...] = scratch["out"][...] * shrink[:, :1] + product(weights, ins["v"][...])

    @pl.when(spot.is_last)
    def _() -> None:
        nothing = total[:, :1] == 0
        some = jnp.where(nothing, 1.0, total[:, :1])
        outs["out"][...] = (scratch["out"][...] / some).astype(outs["out"].dtype)
        outs["logsumexp"][...] = row(jnp.where(nothing, FLOOR, highest[:, :1] + jnp.log(some)))


def d_queries(
    interpreted: bool, plan: Plan, operands: Operands, places: Places, rows: Rows
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of q, of learned numbers by query, and of the feature of queries."""
    q, n, reads = operands.q, plan.block, operands.q_feature is not None
    learned = len(plan.learned)
    found = launched(
        _d_queries,
        UnderQueries(plan, operands, places),
        given := _given(plan, operands, places, rows),
        {
            "d_q": jax.ShapeDtypeStruct(q.shape, q.dtype),
            "d_numbers": _numbers(q, learned) if learned else None,
            "d_q_feature": _numbers(q, 1) if reads else None,
        },
        {
            "columns": _columns(given, _OF_QUERIES, n),
            "d_q": pltpu.VMEM((n, q.shape[3]), jnp.float32),
            "sums": [pltpu.VMEM((n, LANES), jnp.float32)] * (learned + reads),
        },
        interpreted=interpreted,
    )
    of_feature = found["d_q_feature"]
    return found["d_q"], found["d_numbers"], None if of_feature is None else of_feature[:, :, 0]


def _d_queries(walk: Walk, spot: Spot, ins: Refs, outs: Refs, scratch: Refs) -> None:
    plan, d_q, sums = walk.plan, scratch["d_q"], scratch["sums"]

    @pl.when(spot.is_first)
    def _() -> None:
        _fill(scratch["columns"], ins)
        for total in (d_q, *sums):
            total[...] = jnp.zeros_like(total)

    @pl.when(spot.needed)
    def _() -> None:
        at, numbers = _at(walk, spot, ins, scratch["columns"]), _numbers_of(walk, spot, ins)
        d_scores = _d_scores(plan, ins, scratch["columns"], at, numbers)
        d_q[...] += product(d_scores, ins["k"][...])
        for total, slope in zip(sums, slopes(plan, at, numbers, "queries"), strict=True):
            total[...] += jnp.sum(d_scores * slope, axis=1, keepdims=True)

    @pl.when(spot.is_last)
    def _() -> None:
        outs["d_q"][...] = (d_q[...] * plan.scale).astype(outs["d_q"].dtype)
        _write_rows(outs["d_numbers"], sums[: len(plan.learned)])
        _write_rows(outs["d_q_feature"], sums[len(plan.learned) :])


def d_keys(
    interpreted: bool, plan: Plan, operands: Operands, places: Places, rows: Rows
) -> tuple[Array, Array, Array | None]:
    """Gradients of k and v, by heads of queries, and of the feature of keys."""
    q, v, n, reads = operands.q, operands.v, plan.block, operands.k_feature is not None
    k_size = (*q.shape[:2], operands.k.shape[2])
    found = launched(
        _d_keys,
        UnderKeys(plan, operands, places),
        given := _given(plan, operands, places, rows, flipped=True),
        {
            "d_k": jax.ShapeDtypeStruct((*k_size, q.shape[3]), q.dtype),
            "d_v": jax.ShapeDtypeStruct((*k_size, v.shape[3]), v.dtype),
            "d_k_feature": _numbers(operands.k_feature, 1) if reads else None,
        },
        {
            "columns": _columns(given, _OF_KEYS, n),
            "d_k": pltpu.VMEM((n, q.shape[3]), jnp.float32),
            "d_v": pltpu.VMEM((n, v.shape[3]), jnp.float32),
            "sums": [pltpu.VMEM((n, LANES), jnp.float32)] * reads,
        },
        interpreted=interpreted,
    )
    of_feature = found["d_k_feature"]
    return found["d_k"], found["d_v"], None if of_feature is None else of_feature[:, :, 0]


def _d_keys(walk: Walk, spot: Spot, ins: Refs, outs: Refs, scratch: Refs) -> None:
    plan, d_k, d_v, sums = walk.plan, scratch["d_k"], scratch["d_v"], scratch["sums"]

    @pl.when(spot.is_first)
    def _() -> None:
        _fill(scratch["columns"], ins)
        for total in (d_k, d_v, *sums):
            total[...] = jnp.zeros_like(total)

    @pl.when(spot.needed)
    def _() -> None:  # keys along the rows
        at, numbers = _at(walk, spot, ins, scratch["columns"]), _numbers_of(walk, spot, ins)
        q, d_out = ins["q"][...], ins["d_out"][...]
        scores = product(ins["k"][...], q, transposed=True)
        scores = scored(plan, scores, at, numbers, _table(ins, shift=0))
        weights = jnp.exp(scores - ins["logsumexp"][...])
        d_weights = product(ins["v"][...], d_out, transposed=True)
        d_scores = weights * (d_weights - ins["delta"][...])
        d_k[...] += product(d_scores, q)
        d_v[...] += product(weights, d_out)
        for total, slope in zip(sums, slopes(plan, at, numbers, "keys"), strict=True):
            total[...] += jnp.sum(d_scores * slope, axis=1, keepdims=True)

    @pl.when(spot.is_last)
    def _() -> None:
        outs["d_k"][...] = (d_k[...] * plan.scale).astype(outs["d_k"].dtype)
        outs["d_v"][...] = d_v[...].astype(outs["d_v"].dtype)
        _write_rows(outs["d_k_feature"], sums)


def d_table(interpreted: bool, plan: Plan, operands: Operands, places: Places, rows: Rows) -> Array:
    """The gradient of the table."""
    assert operands.table is not None
    walk, n = AlongDiagonals(plan, operands, places), plan.block
    found = launched(
        _d_table,
        walk,
        given := _given(plan, operands, places, rows),
        {"line": jax.ShapeDtypeStruct((*walk.grid[:2], 1, 2 * n), jnp.float32)},
        {"columns": _columns(given, _OF_QUERIES, n)},
        interpreted=interpreted,
    )
    lines = found["line"].reshape(*walk.grid[:2], 2, n)
    low, high = (jnp.pad(lines[:, :, row], ((0, 0), (row, 1 - row), (0, 0))) for row in (0, 1))
    return low + high


def _d_table(walk: Walk, spot: Spot, ins: Refs, outs: Refs, scratch: Refs) -> None:
    line = outs["line"]

    @pl.when(spot.is_first)
    def _() -> None:
        line[...] = jnp.zeros_like(line)

    @pl.when(spot.needed)
    def _() -> None:
        _fill(scratch["columns"], ins)
        at = _at(walk, spot, ins, scratch["columns"])
        line[...] += diagonal_sums(_d_scores(walk.plan, ins, scratch["columns"], at, []))


def _d_scores(plan: Plan, ins: Refs, columns: Refs, at: At, numbers: list[Any]) -> Array:
    """Gradients of the scores of a tile, queries along the rows."""
    scores = product(ins["q"][...], ins["k"][...], transposed=True)
    scores = scored(plan, scores, at, numbers, _table(ins, shift=1))
    weights = jnp.exp(scores - columns["logsumexp"][:, :1])
    d_weights = product(ins["d_out"][...], ins["v"][...], transposed=True)
    return weights * (d_weights - columns["delta"][:, :1])


def _given(
    plan: Plan, operands: Operands, places: Places, rows: Rows | None = None, flipped: bool = False
) -> dict[str, Any]:
    """Operands by name, as ``launched`` takes them."""
    given: dict[str, Any] = {"q": operands.q, "k": operands.k, "v": operands.v}
    for name in ("q_pos", "k_pos", "q_seg", "k_seg"):
        array = getattr(places, name)
        given[name] = None if array is None else array[:, None, None, :]
    for name in ("q_feature", "k_feature"):
        array = getattr(operands, name)
        given[name] = None if array is None else array[:, :, None, :]
    given["numbers"] = None if operands.numbers is None else operands.numbers.reshape(1, -1)
    given["low"] = given["high"] = None
    if operands.table is not None:
        table = jnp.flip(operands.table, (1, 2)) if flipped else operands.table
        given["low"] = given["high"] = table[:, :, None, :]
    if rows is not None:
        given["d_out"] = rows.d_out
        given["logsumexp"], given["delta"] = rows.logsumexp[:, :, None], rows.delta[:, :, None]
    return given


def _numbers(like: Array, count: int) -> jax.ShapeDtypeStruct:
    """``(B, H, count, L)`` float32."""
    batch, heads, length = like.shape[:3]
    return jax.ShapeDtypeStruct((batch, heads, count, length), jnp.float32)


def _columns(given: dict[str, Any], names: tuple[str, ...], size: int) -> dict[str, Any]:
    """Scratch for the numbers of tokens along the rows of a tile."""
    there = (name for name in names if given.get(name) is not None)
    return {name: pltpu.VMEM((size, LANES), given[name].dtype) for name in there}


def _fill(columns: Refs, ins: Refs) -> None:
    for name, into in columns.items():
        into[...] = column(ins[name][...])


def _at(walk: Walk, spot: Spot, ins: Refs, columns: Refs) -> At:
    """Where a tile stands."""
    plan = walk.plan
    keys_down = isinstance(walk, UnderKeys)

    def given(name: str) -> Array | None:
        if name in columns:
            return columns[name][:, :1]
        return None if ins[name] is None else ins[name][...]

    k_index = steps(spot.k_block * plan.block, plan.block, 0 if keys_down else 1)
    q_pos, k_pos = given("q_pos"), given("k_pos")
    if q_pos is None or k_pos is None:
        start = spot.q_block * plan.block + (plan.k_len - plan.q_len)
        q_pos, k_pos = steps(start, plan.block, 1 if keys_down else 0), k_index
    own = (given(name) for name in ("q_seg", "k_seg", "q_feature", "k_feature"))
    return At(q_pos, k_pos, k_index, *own)


def _numbers_of(walk: Walk, spot: Spot, ins: Refs) -> list[Any]:
    """The numbers of the bias for a head."""
    numbers, names = ins["numbers"], walk.plan.learned + walk.plan.fixed
    if numbers is None:
        return []
    each = numbers.shape[1] // walk.heads
    return [numbers[0, spot.head * each + n] for n in range(len(names))]


def _table(ins: Refs, shift: int) -> Array | None:
    if ins["low"] is None:
        return None
    return toeplitz(ins["low"][...], ins["high"][...], shift=shift)


def _write_rows(into: Any, sums: Any) -> None:
    for n, total in enumerate(sums):
        into[n : n + 1, :] = row(total[:, :1])
