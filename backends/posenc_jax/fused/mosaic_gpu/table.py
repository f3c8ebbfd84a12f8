"""The gradient of a table of distances on Hopper GPUs.

All tiles on one diagonal have the same bias, so one program sums their gradients in registers,
over the batch too: nothing is added by atomics, and the result is always the same. A warpgroup
takes every second tile, and computes while the other one waits for its copies.
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
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, fetch, launch
from posenc_jax.fused.mosaic_gpu.tile import (
    LOG2E,
    ROWS,
    products,
    scores,
    spread,
    zeros,
)
from posenc_jax.fused.mosaic_gpu.toeplitz import tiles_for_queries
from posenc_jax.fused.plan import Operands, Places, Plan


def d_table(
    plan: Plan, operands: Operands, places: Places, rows: Rows, *, interpreted: bool
) -> Array:
    """As ``Kernels.d_table``."""
    assert operands.table is not None
    batch, heads, q_size, dim = operands.q.shape
    k_size = operands.k.shape[2]
    dtype = operands.q.dtype
    group = heads // operands.k.shape[1]
    q_tiles, k_tiles, per_block = q_size // ROWS, k_size // ROWS, plan.block // ROWS
    arrays = arrays_of(plan, operands, places, rows)
    arrays["tiles"] = tiles_for_queries(operands.table)
    of_queries, of_keys = present(QUERIES, arrays), present(KEYS, arrays)
    of_queries += ["logsumexp", "delta"]
    matrix, table_tile = Buffer((ROWS, dim), dtype), Buffer((ROWS, ROWS), jnp.float32)
    arriving = dict.fromkeys(("q", "d_out", "k", "v"), matrix)
    arriving |= buffers([*of_queries, *of_keys], arrays, ROWS)
    scratch = {
        "arriving": {name: buffer.times(WARPGROUPS) for name, buffer in arriving.items()},
        "arrived": plgpu.Barrier(num_arrivals=len(arriving), num_barriers=WARPGROUPS),
        "bias": table_tile.times(WARPGROUPS),
        "bias_arrived": plgpu.Barrier(num_barriers=WARPGROUPS),
        "sum": table_tile.times(),
        "summed": plgpu.Barrier(num_arrivals=1),
    }

    def kernel(warpgroup: Any, refs: Mapping[str, Any], own: Any) -> None:
        head, diagonal = lax.axis_index("head"), lax.axis_index("diagonal")
        program = Program(refs, jnp.int32(0), head, heads, group)
        bias_there = own["bias"].at[warpgroup]
        tile = program.tile(diagonal)
        fetch([(tile, bias_there)], own["bias_arrived"].at[warpgroup])
        # Tile (a, b) lies on diagonal q_tiles - 1 + b - a.
        ahead = diagonal - (q_tiles - 1)
        first = lax.max(jnp.int32(0), -ahead)
        count = lax.min(jnp.int32(q_tiles), k_tiles - ahead) - first
        loaded = {name: buffer.at[warpgroup] for name, buffer in own["arriving"].items()}

        def absorb(i: Any, total: Array) -> Array:
            step = WARPGROUPS * i + warpgroup
            here = program._replace(batch=lax.div(step, count))
            a = first + lax.rem(step, count)
            b = a + ahead
            start, end = here.bounds("keys", lax.div(a, jnp.int32(per_block)))
            block = lax.div(b, jnp.int32(per_block))

            def add(total: Array) -> Array:
                return total + tile_gradient(here, a * ROWS, b * ROWS)

            return lax.cond((start <= block) & (block < end), add, lambda total: total, total)

        def tile_gradient(here: Program, q_start: Any, k_start: Any) -> Array:
            copies = [(here.matrix(name, q_start, ROWS), loaded[name]) for name in ("q", "d_out")]
            copies += [(here.matrix(name, k_start, ROWS), loaded[name]) for name in ("k", "v")]
            copies += [(here.vector(name, q_start, ROWS), loaded[name]) for name in of_queries]
            copies += [(here.vector(name, k_start, ROWS), loaded[name]) for name in of_keys]
            plgpu.commit_smem()  # all threads have read the tile before
            fetch(copies, own["arrived"].at[warpgroup])
            product, d_weights = products(
                (loaded["q"], loaded["k"]), (loaded["d_out"], loaded["v"])
            )
            query = side(0, q_start + plan.k_len - plan.q_len, QUERIES, loaded)
            key = side(1, k_start, KEYS, loaded)
            score = scores(plan, product, query, key, plgpu.load(bias_there, layout=WGMMA))
            logsumexp = plgpu.load(loaded["logsumexp"], layout=OF_ROWS) * LOG2E
            delta = plgpu.load(loaded["delta"], layout=OF_ROWS)
            weights = jnp.exp2(score - spread(logsumexp, 0, score.shape))
            return weights * (d_weights - spread(delta, 0, score.shape))

        mine = lax.div(batch * count - warpgroup + WARPGROUPS - 1, jnp.int32(WARPGROUPS))
        total = lax.fori_loop(jnp.int32(0), mine, absorb, zeros(ROWS, ROWS))

        @pl.when(warpgroup == 1)
        def _() -> None:
            own["sum"][...] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(own["summed"])

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.barrier_wait(own["summed"])
            both = total + plgpu.load(own["sum"], layout=WGMMA)
            plgpu.commit_smem()  # all threads have read
            own["sum"][...] = both
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own["sum"], program.tile(diagonal, "d_tiles"))
            plgpu.wait_smem_to_gmem(0)

    results = {"d_tiles": jax.ShapeDtypeStruct(arrays["tiles"].shape, jnp.float32)}
    grid = {"head": heads, "diagonal": q_tiles + k_tiles - 1}
    found = launch(kernel, arrays, results, scratch, grid, interpreted=interpreted)
    (gradient,) = jax.linear_transpose(tiles_for_queries, operands.table)(found["d_tiles"])
    return gradient
