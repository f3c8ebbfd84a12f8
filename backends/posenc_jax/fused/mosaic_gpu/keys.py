"""Gradients of keys and values on Hopper GPUs, on tiles with keys as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc_jax.fused.gradients import Rows
from posenc_jax.fused.mosaic_gpu.jax_version import OF_COLUMNS, OF_ROWS, WGMMA, plgpu
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
    bias_of,
    by_feature,
    plus_product,
    products,
    scores,
    spread,
    tokens,
    zeros,
)
from posenc_jax.fused.mosaic_gpu.toeplitz import tiles_for_keys
from posenc_jax.fused.plan import Operands, Places, Plan

COLUMNS = 64  # queries of a tile: with 128, the sums for keys and values leave no registers


def d_keys(
    plan: Plan, operands: Operands, places: Places, rows: Rows, *, interpreted: bool
) -> tuple[Array, Array, Array | None]:
    """As ``Kernels.d_keys``."""
    batch, heads, q_size, dim = operands.q.shape
    k_size = operands.k.shape[2]
    dtype = operands.q.dtype
    group = heads // operands.k.shape[1]
    arrays = arrays_of(plan, operands, places, rows)
    if operands.table is not None:
        arrays["tiles"] = tiles_for_keys(operands.table)
    of_queries, of_keys = present(QUERIES, arrays), present(KEYS, arrays)
    of_queries += ["logsumexp", "delta"]
    matrix = Buffer((COLUMNS, dim), dtype)
    arriving = {"q": matrix, "d_out": matrix, **buffers(of_queries, arrays, COLUMNS)}
    if operands.table is not None:
        arriving["tiles"] = Buffer((WARPGROUPS, ROWS, ROWS), jnp.float32)
    reads = operands.k_feature is not None
    scratch = {
        "k": Buffer((ROWS, dim), dtype).times(WARPGROUPS),
        "v": Buffer((ROWS, dim), dtype).times(WARPGROUPS),
        "rows": {n: b.times(WARPGROUPS) for n, b in buffers(of_keys, arrays, ROWS).items()},
        "arrived": plgpu.Barrier(num_arrivals=2 + len(of_keys), num_barriers=WARPGROUPS),
        "stream": ring(arriving),
    }
    if reads:
        scratch["d_feature"] = Buffer((ROWS,), jnp.float32).times(WARPGROUPS)
    if interpreted:
        scratch["spare"] = Buffer((ROWS, COLUMNS), dtype).times(WARPGROUPS)

    def kernel(warpgroup: Any, refs: Mapping[str, Any], own: Any) -> None:
        program = Program(refs, lax.axis_index("batch"), lax.axis_index("head"), heads, group)
        block = lax.axis_index("block")
        first, end = program.bounds("queries", block)
        steps, first = (end - first) * (plan.block // COLUMNS), first * plan.block

        def tiles(step: Any) -> Any:
            before = lax.div(block * plan.block - first, jnp.int32(ROWS)) - 1
            return program.tiles(q_size // ROWS + before - step, WARPGROUPS)

        sources = {name: program.matrices(name, first, COLUMNS) for name in ("q", "d_out")}
        sources |= program.vectors(of_queries, first, COLUMNS)
        if operands.table is not None:
            sources["tiles"] = tiles
        stream = Stream(sources, steps, *own["stream"])

        start = block * plan.block + warpgroup * ROWS
        k, v = own["k"].at[warpgroup], own["v"].at[warpgroup]
        loaded = {name: own["rows"][name].at[warpgroup] for name in of_keys}
        spare = own["spare"].at[warpgroup] if interpreted else None
        copies = [(program.vector(name, start, ROWS), loaded[name]) for name in of_keys]
        copies += [(program.matrix("k", start, ROWS), k), (program.matrix("v", start, ROWS), v)]
        fetch(copies, own["arrived"].at[warpgroup])
        numbers = program.numbers(plan)

        def absorb(step: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_k, d_v = carry
            arrived = stream.wait(step)
            (product,) = products((k, arrived["q"]))
            position = first + step * COLUMNS + plan.k_len - plan.q_len
            query = side(1, position, QUERIES, arrived)
            key = side(0, start, KEYS, loaded)
            bias: Any = bias_of(plan, numbers)
            if operands.table is not None:
                bias = plgpu.load(arrived["tiles"].at[warpgroup], layout=WGMMA)
            score = scores(plan, product, query, key, bias)
            shape = score.shape
            logsumexp = plgpu.load(arrived["logsumexp"], layout=OF_COLUMNS) * LOG2E
            weights = jnp.exp2(score - spread(logsumexp, 1, shape))
            # One product after the other: together they would take more registers than there are.
            d_v = plus_product(d_v, weights.astype(dtype), arrived["d_out"], spare)
            (d_weights,) = products((v, arrived["d_out"]))
            delta = plgpu.load(arrived["delta"], layout=OF_COLUMNS)
            d_scores = weights * (d_weights - spread(delta, 1, shape))
            if reads:
                slope = by_feature(plan, numbers, *tokens(plan, query, key, shape), "key")
                # In shared memory: with them, there would be too few registers.
                sums = own["d_feature"].at[warpgroup]
                sums[...] = plgpu.load(sums, layout=OF_ROWS) + (d_scores * slope).sum(axis=1)
                plgpu.commit_smem()
            d_k = plus_product(d_k, d_scores.astype(dtype), arrived["q"], spare)
            stream.release(step)
            return d_k, d_v

        if reads:
            own["d_feature"].at[warpgroup][...] = zeros(ROWS)
            plgpu.commit_smem()
        nothing = zeros(ROWS, dim), zeros(ROWS, dim)
        d_k, d_v = run(warpgroup, (stream,), absorb, nothing)
        k[...] = (d_k * plan.scale).astype(dtype)
        v[...] = d_v.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k, program.matrix("d_k", start, ROWS))
        plgpu.copy_smem_to_gmem(v, program.matrix("d_v", start, ROWS))
        if reads:
            target = program.vector("d_feature", start, ROWS)
            plgpu.copy_smem_to_gmem(own["d_feature"].at[warpgroup], target)
        plgpu.wait_smem_to_gmem(0)

    shape = (batch, heads, k_size, dim)
    results = {name: jax.ShapeDtypeStruct(shape, dtype) for name in ("d_k", "d_v")}
    if reads:
        results["d_feature"] = jax.ShapeDtypeStruct((batch, heads, k_size), jnp.float32)
    grid = {"head": heads, "block": plan.k_blocks, "batch": batch}
    found = launch(kernel, arrays, results, scratch, grid, interpreted=interpreted)
    return found["d_k"], found["d_v"], found.get("d_feature")
