"""Attention forward on Hopper GPUs: an online softmax, with its score tiles in registers.

Two warpgroups have 64 queries each, and share keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from posenc_jax.fused.mosaic_gpu.jax_version import plgpu
from posenc_jax.fused.mosaic_gpu.operands import PER_KEY, PER_QUERY, Buffer, swap_heads
from posenc_jax.fused.mosaic_gpu.prologue import Scratch, arrange, prologue
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, PingPong, launch, run_steps
from posenc_jax.fused.mosaic_gpu.tile import (
    LOG2E,
    MIN_SCORE_BASE_2,
    ROWS,
    broadcast,
    keep_apart,
    masked_scores,
    plus_product,
    products,
    score_factor,
    softmax_weights,
    zeros,
)
from posenc_jax.fused.plan import MIN_SCORE, Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type


def forward(
    plan: Plan, operands: Operands, integers: Integers, *, interpreted: bool
) -> tuple[Array, Array]:
    """The output and log-sum-exp, as ``Kernels.forward``."""
    dim, dtype = operands.q.shape[3], operands.q.dtype
    arrangement = arrange(
        plan,
        operands,
        integers,
        over="keys",
        columns=plan.block if operands.table is None else ROWS,
        rows=("q", *PER_QUERY),
        streams=(("k", *PER_KEY, "tiles"), ("v",)),
    )
    own = {
        "logsumexp": Buffer((ROWS,), jnp.float32).scratch(WARPGROUPS),
        "ping_pong": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }

    def kernel(warpgroup: Any, refs: Mapping[str, Any], scratch: Scratch) -> None:
        loop = prologue(arrangement, warpgroup, refs, scratch)
        key_stream, value_stream = loop.streams
        q, query = loop.rows["q"], loop.row_side()
        ping_pong = PingPong(scratch.own["ping_pong"], warpgroup)

        def absorb(step: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, highest, total = carry
            blocks = key_stream.wait(step)
            (product,) = products((q, blocks["k"]), meanwhile=ping_pong.switch)
            key = loop.column_side(step, blocks)
            scores = masked_scores(plan, product, query, key, loop.bias(blocks))
            key_stream.release(step)
            higher = jnp.maximum(highest, scores.max(axis=1) * score_factor(plan))
            shrink = jnp.exp2(highest - higher)
            weights = softmax_weights(plan, scores, higher, 0)
            total = total * shrink + weights.sum(axis=1)
            out = out * broadcast(shrink, 0, out.shape)
            # All of this is computed before the other warpgroup has its turn.
            out, total, higher, rounded = keep_apart((out, total, higher, weights.astype(dtype)))
            ping_pong.arrive()
            v = value_stream.wait(step)["v"]
            ping_pong.wait()
            out = plus_product(out, rounded, v, loop.interpreter_scratch)
            value_stream.release(step)
            return out, higher, total

        start = (zeros(ROWS, dim), zeros(ROWS) + MIN_SCORE_BASE_2, zeros(ROWS))
        out, highest, total = run_steps(loop.steps, absorb, start, ping_pong)
        positive = jnp.where(total == 0, 1.0, total)
        q[...] = (out * broadcast(1 / positive, 0, out.shape)).astype(dtype)
        logsumexp = scratch.own["logsumexp"].at[warpgroup]
        logsumexp[...] = jnp.where(total == 0, MIN_SCORE, highest * (1 / LOG2E) + jnp.log(positive))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, loop.program.tokens("out", loop.start, ROWS))
        plgpu.copy_smem_to_gmem(logsumexp, loop.program.tokens("logsumexp", loop.start, ROWS))
        plgpu.wait_smem_to_gmem(0)

    results = {
        "out": array_type(arrangement.arrays["q"].shape, dtype),
        "logsumexp": array_type(operands.q.shape[:3], jnp.float32),
    }
    scratch = arrangement.scratch(own, interpreted=interpreted)
    outputs = launch(
        kernel, arrangement.arrays, results, scratch, arrangement.grid, interpreted=interpreted
    )
    return swap_heads(outputs["out"]), outputs["logsumexp"]
