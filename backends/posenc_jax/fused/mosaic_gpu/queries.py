"""Gradients of queries on Hopper GPUs, and of what a bias has to do with them.

What the numbers of a head gain is summed row by row, in registers, and over rows outside: nothing
is added by atomics, so the result is always the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.gradients import Rows
from posenc_jax.fused.mosaic_gpu.jax_version import OF_ROWS, WGMMA, plgpu
from posenc_jax.fused.mosaic_gpu.operands import (
    KEYS,
    QUERIES,
    Buffer,
    Program,
    arrays_of,
    buffers,
    present,
    side,
)
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, Stream, fetch, launch, ring, run
from posenc_jax.fused.mosaic_gpu.tile import (
    LOG2E,
    ROWS,
    apart,
    bias_of,
    by_feature,
    by_number,
    plus_product,
    products,
    scores,
    spread,
    tokens,
    zeros,
)
from posenc_jax.fused.mosaic_gpu.toeplitz import tiles_for_queries
from posenc_jax.fused.plan import Operands, Places, Plan

COLUMNS = 64  # keys of a tile: with 128, registers spill


def d_queries(
    plan: Plan, operands: Operands, places: Places, rows: Rows, *, interpreted: bool
) -> tuple[Array, Array | None, Array | None]:
    """As ``Kernels.d_queries``."""
    batch, heads, q_size, dim = operands.q.shape
    dtype = operands.q.dtype
    group = heads // operands.k.shape[1]
    arrays = arrays_of(plan, operands, places, rows)
    if operands.table is not None:
        arrays["tiles"] = tiles_for_queries(operands.table)
    of_queries, of_keys = present(QUERIES, arrays), present(KEYS, arrays)
    of_queries += ["logsumexp", "delta"]
    matrix = Buffer((COLUMNS, dim), dtype)
    arriving = {"k": matrix, "v": matrix, **buffers(of_keys, arrays, COLUMNS)}
    if operands.table is not None:
        arriving["tiles"] = Buffer((WARPGROUPS, ROWS, ROWS), jnp.float32)
    reads = operands.q_feature is not None
    sums = len(plan.learned) + reads  # numbers a row that the bias gives rise to
    scratch = {
        "q": Buffer((ROWS, dim), dtype).times(WARPGROUPS),
        "d_out": Buffer((ROWS, dim), dtype).times(WARPGROUPS),
        "rows": {n: b.times(WARPGROUPS) for n, b in buffers(of_queries, arrays, ROWS).items()},
        "arrived": plgpu.Barrier(num_arrivals=2 + len(of_queries), num_barriers=WARPGROUPS),
        "stream": ring(arriving),
        "sums": [Buffer((ROWS,), jnp.float32).times(WARPGROUPS) for _ in range(sums)],
    }
    if interpreted:
        scratch["spare"] = Buffer((ROWS, COLUMNS), dtype).times(WARPGROUPS)

    def kernel(warpgroup: Any, refs: Mapping[str, Any], own: Any) -> None:
        program = Program(refs, lax.axis_index("batch"), lax.axis_index("head"), heads, group)
        block = lax.axis_index("block")
        if plan.causal:  # those that take longest begin first
            block = plan.q_blocks - 1 - block
        first, end = program.bounds("keys", block)
        steps, first = (end - first) * (plan.block // COLUMNS), first * plan.block

        def tiles(step: Any) -> Any:
            before = lax.div(first - block * plan.block, jnp.int32(ROWS)) - WARPGROUPS
            return program.tiles(q_size // ROWS + before + step, WARPGROUPS)

        sources = {name: program.matrices(name, first, COLUMNS) for name in ("k", "v")}
        sources |= program.vectors(of_keys, first, COLUMNS)
        if operands.table is not None:
            sources["tiles"] = tiles
        stream = Stream(sources, steps, *own["stream"])

        start = block * plan.block + warpgroup * ROWS
        q, d_out = own["q"].at[warpgroup], own["d_out"].at[warpgroup]
        loaded = {name: own["rows"][name].at[warpgroup] for name in of_queries}
        spare = own["spare"].at[warpgroup] if interpreted else None
        copies = [(program.vector(name, start, ROWS), loaded[name]) for name in of_queries]
        copies += [
            (program.matrix("q", start, ROWS), q),
            (program.matrix("d_out", start, ROWS), d_out),
        ]
        fetch(copies, own["arrived"].at[warpgroup])
        query = side(0, start + plan.k_len - plan.q_len, QUERIES, loaded)
        logsumexp = plgpu.load(loaded["logsumexp"], layout=OF_ROWS) * LOG2E
        delta = plgpu.load(loaded["delta"], layout=OF_ROWS)
        numbers = program.numbers(plan)

        def absorb(step: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_q, *found = carry
            arrived = stream.wait(step)
            product, d_weights = products((q, arrived["k"]), (d_out, arrived["v"]))
            key = side(1, first + step * COLUMNS, KEYS, arrived)
            bias: Any = bias_of(plan, numbers)
            if operands.table is not None:
                bias = plgpu.load(arrived["tiles"].at[WARPGROUPS - 1 - warpgroup], layout=WGMMA)
            score = scores(plan, product, query, key, bias)
            shape = score.shape
            weights = jnp.exp2(score - spread(logsumexp, 0, shape))
            d_scores = weights * (d_weights - spread(delta, 0, shape))
            slopes = []
            if sums:
                at = tokens(plan, apart(query), apart(key), shape)
                slopes = [by_number(plan, numbers, n, *at) for n in range(len(plan.learned))]
            if reads:
                slopes.append(by_feature(plan, numbers, *at, "query"))
            found = [
                f + (d_scores * slope).sum(axis=1) for f, slope in zip(found, slopes, strict=True)
            ]
            d_q = plus_product(d_q, d_scores.astype(dtype), arrived["k"], spare)
            stream.release(step)
            return d_q, *found

        nothing = (zeros(ROWS, dim), *(zeros(ROWS) for _ in range(sums)))
        d_q, *found = run(warpgroup, (stream,), absorb, nothing)
        q[...] = (d_q * plan.scale).astype(dtype)
        for buffer, row_sums in zip(own["sums"], found, strict=True):
            buffer.at[warpgroup][...] = row_sums
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, program.matrix("d_q", start, ROWS))
        for n in range(sums):
            target = (
                program.refs["d_rows"].at[program.batch, program.head, n]
                if n < len(plan.learned)
                else program.refs["d_feature"].at[program.batch, program.head]
            )
            plgpu.copy_smem_to_gmem(own["sums"][n].at[warpgroup], target.at[pl.ds(start, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    results = {"d_q": jax.ShapeDtypeStruct(operands.q.shape, dtype)}
    if plan.learned:
        shape = (batch, heads, len(plan.learned), q_size)
        results["d_rows"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if reads:
        results["d_feature"] = jax.ShapeDtypeStruct((batch, heads, q_size), jnp.float32)
    grid = {"head": heads, "block": plan.q_blocks, "batch": batch}
    found = launch(kernel, arrays, results, scratch, grid, interpreted=interpreted)
    return found["d_q"], found.get("d_rows"), found.get("d_feature")
