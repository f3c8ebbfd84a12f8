"""Attention forward on Hopper GPUs: an online softmax, its score tiles in registers.

Two warpgroups have 64 queries each, and share keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc_jax.fused.mosaic_gpu.jax_version import WGMMA, plgpu
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
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, Stream, Turns, fetch, launch, ring, run
from posenc_jax.fused.mosaic_gpu.tile import (
    LOG2E,
    MIN_POSITION,
    ROWS,
    bias_of,
    plus_product,
    products,
    scores,
    spread,
    zeros,
)
from posenc_jax.fused.mosaic_gpu.toeplitz import tiles_for_queries
from posenc_jax.fused.plan import FLOOR, Operands, Places, Plan


def forward(
    plan: Plan, operands: Operands, places: Places, *, interpreted: bool
) -> tuple[Array, Array]:
    """The output and log-sum-exp, as ``Kernels.forward``."""
    batch, heads, q_size, dim = operands.q.shape
    dtype = operands.q.dtype
    group = heads // operands.k.shape[1]
    arrays = arrays_of(plan, operands, places)
    columns = plan.block
    if operands.table is not None:
        arrays["tiles"], columns = tiles_for_queries(operands.table), ROWS
    of_queries, of_keys = present(QUERIES, arrays), present(KEYS, arrays)
    early = {"k": Buffer((columns, dim), dtype), **buffers(of_keys, arrays, columns)}
    if operands.table is not None:
        early["tiles"] = Buffer((WARPGROUPS, ROWS, ROWS), jnp.float32)
    scratch = {
        "q": Buffer((ROWS, dim), dtype).times(WARPGROUPS),
        "rows": {
            name: b.times(WARPGROUPS) for name, b in buffers(of_queries, arrays, ROWS).items()
        },
        "arrived": plgpu.Barrier(num_arrivals=1 + len(of_queries), num_barriers=WARPGROUPS),
        "logsumexp": Buffer((ROWS,), jnp.float32).times(WARPGROUPS),
        "turns": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "early": ring(early),
        "late": ring({"v": Buffer((columns, dim), dtype)}),
    }
    if interpreted:
        scratch["spare"] = Buffer((ROWS, columns), dtype).times(WARPGROUPS)

    def kernel(warpgroup: Any, refs: Mapping[str, Any], own: Any) -> None:
        program = Program(refs, lax.axis_index("batch"), lax.axis_index("head"), heads, group)
        block = lax.axis_index("block")
        if plan.causal:  # those that take longest begin first
            block = plan.q_blocks - 1 - block
        first, end = program.bounds("keys", block)
        steps, first = (end - first) * (plan.block // columns), first * plan.block

        def tiles(step: Any) -> Any:
            before = lax.div(first - block * plan.block, jnp.int32(ROWS)) - WARPGROUPS
            return program.tiles(q_size // ROWS + before + step, WARPGROUPS)

        sources = {
            "k": program.matrices("k", first, columns),
            **program.vectors(of_keys, first, columns),
        }
        if operands.table is not None:
            sources["tiles"] = tiles
        early = Stream(sources, steps, *own["early"])
        late = Stream({"v": program.matrices("v", first, columns)}, steps, *own["late"])

        start = block * plan.block + warpgroup * ROWS
        q = own["q"].at[warpgroup]
        rows = {name: own["rows"][name].at[warpgroup] for name in of_queries}
        spare = own["spare"].at[warpgroup] if interpreted else None
        copies = [(program.vector(name, start, ROWS), rows[name]) for name in of_queries]
        fetch([(program.matrix("q", start, ROWS), q), *copies], own["arrived"].at[warpgroup])
        query = side(0, start + plan.k_len - plan.q_len, QUERIES, rows)
        numbers = program.numbers(plan)

        def absorb(step: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            summed, highest, total = carry
            arrived = early.wait(step)
            (product,) = products((q, arrived["k"]), meanwhile=turns.change)
            key = side(1, first + step * columns, KEYS, arrived)
            bias: Any = bias_of(plan, numbers)
            if operands.table is not None:
                bias = plgpu.load(arrived["tiles"].at[WARPGROUPS - 1 - warpgroup], layout=WGMMA)
            found = scores(plan, product, query, key, bias)
            early.release(step)
            higher = jnp.maximum(highest, found.max(axis=1))
            shrink = jnp.exp2(highest - higher)
            weights = jnp.exp2(found - spread(higher, 0, found.shape))
            total = total * shrink + weights.sum(axis=1)
            summed = summed * spread(shrink, 0, summed.shape)
            rounded = weights.astype(dtype)
            # What is before the barrier is computed before the other warpgroup has its turn.
            summed, total, higher, rounded = lax.optimization_barrier(
                (summed, total, higher, rounded)
            )
            turns.arrive()
            v = late.wait(step)["v"]
            turns.wait()
            summed = plus_product(summed, rounded, v, spare)
            late.release(step)
            return summed, higher, total

        lowest = zeros(ROWS) + MIN_POSITION
        nothing = (zeros(ROWS, dim), lowest, zeros(ROWS))
        turns = Turns(own["turns"], warpgroup)
        summed, highest, total = run(warpgroup, (early, late), absorb, nothing, turns)
        some = jnp.where(total == 0, 1.0, total)
        q[...] = (summed * spread(1 / some, 0, summed.shape)).astype(dtype)
        logsumexp = own["logsumexp"].at[warpgroup]
        logsumexp[...] = jnp.where(total == 0, FLOOR, highest * (1 / LOG2E) + jnp.log(some))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, program.matrix("out", start, ROWS))
        plgpu.copy_smem_to_gmem(logsumexp, program.vector("logsumexp", start, ROWS))
        plgpu.wait_smem_to_gmem(0)

    found = launch(
        kernel,
        arrays,
        {
            "out": jax.ShapeDtypeStruct(operands.q.shape, dtype),
            "logsumexp": jax.ShapeDtypeStruct((batch, heads, q_size), jnp.float32),
        },
        scratch,
        {"head": heads, "block": plan.q_blocks, "batch": batch},
        interpreted=interpreted,
    )
    return found["out"], found["logsumexp"]
