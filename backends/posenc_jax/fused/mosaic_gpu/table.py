"""The gradient of a table by distance on Hopper GPUs.

All tiles on one near diagonal have the same bias. So one program sums their gradients in registers,
over the batch too. Nothing is added by atomics, and the result is always the same. A warpgroup
takes every second tile, and computes while the other one waits for its copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.mosaic_gpu.jax_version import WGMMA, plgpu
from posenc_jax.fused.mosaic_gpu.operands import (
    PER_KEY,
    PER_QUERY,
    STATISTICS,
    Buffer,
    Program,
    buffer_for,
    load_delta,
    load_logsumexp,
    load_side,
    named_arrays,
    present,
)
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, fetch, launch
from posenc_jax.fused.mosaic_gpu.tile import ROWS, masked_scores, products, tile_gradient, zeros
from posenc_jax.fused.mosaic_gpu.toeplitz import first_table_tile, tiles_for_queries
from posenc_jax.fused.plan import Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type


def d_table(
    plan: Plan, operands: Operands, integers: Integers, residuals: Residuals, *, interpreted: bool
) -> Array:
    """As ``Kernels.d_table``."""
    assert operands.table is not None
    batch, heads, q_size, _ = operands.q.shape
    k_size, kv_heads = operands.k.shape[2], operands.k.shape[1]
    q_tiles, k_tiles, per_block = q_size // ROWS, k_size // ROWS, plan.block // ROWS
    arrays = named_arrays(plan, operands, integers, residuals)
    arrays["tiles"] = tiles_for_queries(operands.table)
    of_queries = present(("q", "d_out", *PER_QUERY, *STATISTICS), arrays)
    of_keys = present(("k", "v", *PER_KEY), arrays)
    buffers = {name: buffer_for(name, arrays, ROWS) for name in (*of_queries, *of_keys)}
    table_tile = Buffer((ROWS, ROWS), jnp.float32)
    scratch = {
        "tokens": {name: buffer.scratch(WARPGROUPS) for name, buffer in buffers.items()},
        "tokens_arrived": plgpu.Barrier(num_arrivals=len(buffers), num_barriers=WARPGROUPS),
        "bias": table_tile.scratch(WARPGROUPS),
        "bias_arrived": plgpu.Barrier(num_barriers=WARPGROUPS),
        "sum": table_tile.scratch(),
        "summed": plgpu.Barrier(num_arrivals=1),
    }

    def kernel(warpgroup: Any, refs: Mapping[str, Any], scratch: Any) -> None:
        head, diagonal = lax.axis_index("head"), lax.axis_index("diagonal")
        program = Program(refs, jnp.int32(0), head, heads, heads // kv_heads)
        bias = scratch["bias"].at[warpgroup]
        fetch([(program.table_tile(diagonal), bias)], scratch["bias_arrived"].at[warpgroup])
        ahead = first_table_tile(plan) + diagonal  # b - a of its tiles (a, b)
        first = lax.max(jnp.int32(0), -ahead)
        count = lax.min(jnp.int32(q_tiles), k_tiles - ahead) - first
        loaded = {name: buffer.at[warpgroup] for name, buffer in scratch["tokens"].items()}

        def absorb(i: Any, total: Array) -> Array:
            step = WARPGROUPS * i + warpgroup
            here = program._replace(batch=lax.div(step, count))
            a = first + lax.rem(step, count)
            b = a + ahead
            start, end = here.range_of("key_ranges", lax.div(a, jnp.int32(per_block)))
            block = lax.div(b, jnp.int32(per_block))

            def add(total: Array) -> Array:
                return total + gradient_at(here, a * ROWS, b * ROWS)

            needed = (start <= block) & (block < end)
            if plan.has_far:  # the outer diagonals pass through far blocks too
                near_first, near_end = plan.near_keys(lax.div(a, jnp.int32(per_block)))
                needed &= (near_first <= block) & (block < near_end)
            added: Array = lax.cond(needed, add, lambda total: total, total)
            return added

        def gradient_at(here: Program, q_start: Any, k_start: Any) -> Array:
            copies = [(here.tokens(name, q_start, ROWS), loaded[name]) for name in of_queries]
            copies += [(here.tokens(name, k_start, ROWS), loaded[name]) for name in of_keys]
            plgpu.commit_smem()  # all threads have read the tile before
            fetch(copies, scratch["tokens_arrived"].at[warpgroup])
            product, d_weights = products(
                (loaded["q"], loaded["k"]), (loaded["d_out"], loaded["v"])
            )
            query = load_side(0, q_start + plan.k_len - plan.q_len, PER_QUERY, loaded)
            key = load_side(1, k_start, PER_KEY, loaded)
            scores = masked_scores(plan, product, query, key, plgpu.load(bias, layout=WGMMA))
            logsumexp, delta = load_logsumexp(loaded, 0), load_delta(loaded, 0)
            return tile_gradient(plan, scores, d_weights, logsumexp, delta)

        own_count = lax.div(batch * count - warpgroup + WARPGROUPS - 1, jnp.int32(WARPGROUPS))
        total = lax.fori_loop(jnp.int32(0), own_count, absorb, zeros(ROWS, ROWS))

        @pl.when(warpgroup == 1)
        def _() -> None:
            scratch["sum"][...] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["summed"])

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.barrier_wait(scratch["summed"])
            both = total + plgpu.load(scratch["sum"], layout=WGMMA)
            plgpu.commit_smem()  # all threads have read
            scratch["sum"][...] = both
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch["sum"], program.table_tile(diagonal, "d_tiles"))
            plgpu.wait_smem_to_gmem(0)

    results = {"d_tiles": array_type(arrays["tiles"].shape, jnp.float32)}
    grid = {"head": heads, "diagonal": arrays["tiles"].shape[0] // heads}
    outputs = launch(kernel, arrays, results, scratch, grid, interpreted=interpreted)
    gradient: Array
    (gradient,) = jax.linear_transpose(tiles_for_queries, operands.table)(outputs["d_tiles"])
    return gradient
