"""Gradients of keys and values on Hopper GPUs, on tiles with keys as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from posenc_jax.fused.gradients import Residuals
from posenc_jax.fused.mosaic_gpu.jax_version import ROW_LAYOUT, plgpu
from posenc_jax.fused.mosaic_gpu.operands import (
    PER_KEY,
    PER_QUERY,
    STATISTICS,
    Buffer,
    load_delta,
    swap_heads,
)
from posenc_jax.fused.mosaic_gpu.prologue import Scratch, arrange, prologue
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, launch
from posenc_jax.fused.mosaic_gpu.tile import (
    ROWS,
    bias_tokens,
    d_by_feature,
    masked_scores,
    plus_product,
    products,
    softmax_gradient,
    softmax_weights,
    zeros,
)
from posenc_jax.fused.plan import Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type

COLUMNS = 64  # queries per tile: with 128, the sums for keys and values take all registers


def d_keys(
    plan: Plan, operands: Operands, integers: Integers, residuals: Residuals, *, interpreted: bool
) -> tuple[Array, Array, Array | None]:
    """As ``Kernels.d_keys``."""
    batch, heads, _, dim = operands.q.shape
    k_size, dtype = operands.k.shape[2], operands.q.dtype
    has_feature = operands.k_feature is not None
    arrangement = arrange(
        plan,
        operands,
        integers,
        residuals,
        over="queries",
        columns=COLUMNS,
        rows=(*PER_KEY, "k", "v"),
        streams=(("q", "d_out", *PER_QUERY, *STATISTICS),),
    )
    own = {"d_feature": Buffer((ROWS,), jnp.float32).scratch(WARPGROUPS)} if has_feature else {}

    def kernel(warpgroup: Any, refs: Mapping[str, Any], scratch: Scratch) -> None:
        loop = prologue(arrangement, warpgroup, refs, scratch)
        stream, program = loop.streams[0], loop.program
        k, v = loop.rows["k"], loop.rows["v"]

        def absorb(step: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_k, d_v = carry
            blocks = stream.wait(step)
            q, d_out = blocks["q"], blocks["d_out"]
            (product,) = products((k, q))
            query = loop.column_side(step, blocks)
            key = loop.row_side()  # loaded in every step, because registers are few
            scores = masked_scores(plan, product, query, key, loop.bias(step, product.shape))
            weights = softmax_weights(plan, scores, loop.logsumexp(blocks), 1)
            # One product after the other: together they take more registers than there are.
            d_v = plus_product(d_v, weights.astype(dtype), d_out, loop.interpreter_scratch)
            (d_weights,) = products((v, d_out))
            d_scores = softmax_gradient(weights, d_weights, load_delta(blocks, 1), 1)
            if has_feature:
                tokens = bias_tokens(plan, query, key, d_scores.shape)
                derivative = d_by_feature(plan, loop.head_scalars, *tokens, "key")
                # Summed in shared memory: in registers, there would be too few.
                sums = scratch.own["d_feature"].at[warpgroup]
                before = plgpu.load(sums, layout=ROW_LAYOUT)
                sums[...] = before + (d_scores * derivative).sum(axis=1)
                plgpu.commit_smem()
            d_k = plus_product(d_k, d_scores.astype(dtype), q, loop.interpreter_scratch)
            stream.release(step)
            loop.release_bias(step)
            return d_k, d_v

        if has_feature:
            scratch.own["d_feature"].at[warpgroup][...] = zeros(ROWS)
            plgpu.commit_smem()
        start = zeros(ROWS, dim), zeros(ROWS, dim)
        d_k, d_v = lax.fori_loop(jnp.int32(0), loop.steps, absorb, start)
        k[...] = (d_k * plan.scale).astype(dtype)
        v[...] = d_v.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k, program.tokens("d_k", loop.start, ROWS))
        plgpu.copy_smem_to_gmem(v, program.tokens("d_v", loop.start, ROWS))
        if has_feature:
            target = program.tokens("d_feature", loop.start, ROWS)
            plgpu.copy_smem_to_gmem(scratch.own["d_feature"].at[warpgroup], target)
        plgpu.wait_smem_to_gmem(0)

    shape = (batch, k_size, heads, dim)
    results = {name: array_type(shape, dtype) for name in ("d_k", "d_v")}
    if has_feature:
        results["d_feature"] = array_type((batch, heads, k_size), jnp.float32)
    scratch = arrangement.scratch(own, interpreted=interpreted)
    outputs = launch(
        kernel, arrangement.arrays, results, scratch, arrangement.grid, interpreted=interpreted
    )
    d_k, d_v = (swap_heads(outputs[name]) for name in ("d_k", "d_v"))
    return d_k, d_v, outputs.get("d_feature")
