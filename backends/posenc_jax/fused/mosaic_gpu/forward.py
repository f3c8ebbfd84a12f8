"""Attention forward on Hopper GPUs: an online softmax, with its score tiles in registers.

Two warpgroups have 64 queries each, and share keys and values. A step issues the product of queries
with the next keys, and of weights with these values, together. The next softmax begins when the
first is done, and the tensor cores have the second meanwhile, and then the other warpgroup's. After
Shah et al. 2024, "FlashAttention-3", arXiv 2407.08608, sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.mosaic_gpu.jax_version import plgpu
from posenc_jax.fused.mosaic_gpu.operands import PER_KEY, PER_QUERY, Buffer, swap_heads
from posenc_jax.fused.mosaic_gpu.prologue import Scratch, arrange, prologue
from posenc_jax.fused.mosaic_gpu.stream import WARPGROUPS, PingPong, launch
from posenc_jax.fused.mosaic_gpu.tile import (
    LOG2E,
    MIN_SCORE_BASE_2,
    ROWS,
    broadcast,
    keep_apart,
    left_operand,
    masked_scores,
    plus_product,
    products,
    score_factor,
    softmax_weights,
    zeros,
)
from posenc_jax.fused.plan import MIN_SCORE, Integers, Operands, Plan
from posenc_jax.fused.shapes import array_type


class _Carry(NamedTuple):
    """What a step passes to the next one.

    Attributes
    ----------
    out
        Weights times values so far, without those of ``weights``.
    highest, total
        Per row, the highest score and the sum of weights.
    weights
        The last weights, not yet multiplied: a tile for every 64 keys.
    """

    out: Array
    highest: Array
    total: Array
    weights: tuple[Array, ...]


def _carry(out: Array, highest: Array, total: Array, weights: list[Array], dtype: Any) -> _Carry:
    """The same, with these weights added to the total and rounded."""
    total = total + reduce(jnp.add, weights).sum(axis=1)
    return _Carry(out, highest, total, tuple(tile.astype(dtype) for tile in weights))


def _part(ref: Any, at: int) -> Any:
    """64 tokens of a block."""
    return ref.at[pl.ds(at, ROWS)]


def forward(
    plan: Plan, operands: Operands, integers: Integers, *, interpreted: bool
) -> tuple[Array, Array]:
    """The output and log-sum-exp, as ``Kernels.forward``."""
    dim, dtype = operands.q.shape[3], operands.q.dtype
    # Scores are computed for 64 keys at a time: for more, registers are too few beside products in
    # flight. Tiles of a table leave shared memory for no more.
    parts = range(0, plan.block if operands.table is None else ROWS, ROWS)
    arrangement = arrange(
        plan,
        operands,
        integers,
        over="keys",
        columns=len(parts) * ROWS,
        rows=("q", *PER_QUERY),
        streams=(("k", *PER_KEY), ("v",)),
    )
    own = {
        "logsumexp": Buffer((ROWS,), jnp.float32).scratch(WARPGROUPS),
        "ping_pong": plgpu.Barrier(num_barriers=WARPGROUPS),
    }

    def kernel(warpgroup: Any, refs: Mapping[str, Any], scratch: Scratch) -> None:
        loop = prologue(arrangement, warpgroup, refs, scratch)
        key_stream, value_stream = loop.streams[:2]
        q = loop.rows["q"]
        ping_pong = PingPong(scratch.own["ping_pong"], warpgroup)

        def softmax(
            step: Any, product: Array, blocks: Any, highest: Array
        ) -> tuple[Array, Array, list[Array]]:
            """The new maximum per row, the factor of earlier sums, and weights of each part."""
            query, scores = loop.row_side(), []  # loaded in every step, because registers are few
            for at in parts:
                part = {name: _part(ref, at) for name, ref in blocks.items()}
                key = loop.column_side(step, part, at)
                of_part = product[:, at : at + ROWS]
                bias = loop.bias(step, of_part.shape)
                scores.append(masked_scores(plan, of_part, query, key, bias))
            key_stream.release(step)
            loop.release_bias(step)
            of_step = reduce(jnp.maximum, scores).max(axis=1) * score_factor(plan)
            higher = jnp.maximum(highest, of_step)
            weights = [softmax_weights(plan, tile, higher, 0) for tile in scores]
            return higher, jnp.exp2(highest - higher), weights

        def scratch_part(at: int) -> Any:
            return loop.interpreter_scratch.at[:, pl.ds(at, ROWS)] if interpreted else None

        def absorb(step: Any, carry: _Carry) -> _Carry:
            """Multiply the weights of a step with its values, and find those of the next step."""
            blocks, v = key_stream.wait(step + 1), value_stream.wait(step)["v"]
            weights = [
                left_operand(tile, scratch_part(at))
                for at, tile in zip(parts, carry.weights, strict=True)
            ]

            def compute(product_sum: Any, out_sum: Any) -> _Carry:
                if not interpreted:  # which has no store
                    out_sum[...] = carry.out
                plgpu.wgmma(product_sum, q, blocks["k"].transpose((1, 0)))
                for at, of_part in zip(parts, weights, strict=True):
                    plgpu.wgmma(out_sum, of_part, _part(v, at))
                ping_pong.pass_on()
                # The products with values are still in flight.
                product = plgpu.wgmma_accumulator_load(product_sum, wait_n=len(parts))
                # And read the registers of their weights: the next ones stay float32 until the end.
                # The wait for a turn is a branch, which ptxas moves no arithmetic across.
                highest, shrink, exact = keep_apart(
                    softmax(step + 1, product, blocks, carry.highest)
                )
                ping_pong.wait()
                out = carry.out + out_sum[...] if interpreted else out_sum[...]
                value_stream.release(step)
                out = out * broadcast(shrink, 0, out.shape)
                return _carry(out, highest, carry.total * shrink, exact, dtype)

            sums = [plgpu.ACC((ROWS, n), jnp.float32) for n in (arrangement.columns, dim)]
            next_carry: _Carry = pl.run_scoped(compute, *sums)
            return next_carry

        def attend() -> tuple[Array, Array, Array]:
            blocks = key_stream.wait(jnp.int32(0))
            ping_pong.begin()
            (product,) = products((q, blocks["k"]), meanwhile=ping_pong.pass_on)
            highest, _, exact = softmax(jnp.int32(0), product, blocks, lowest)
            ping_pong.wait()
            carry = _carry(zeros(ROWS, dim), highest, zeros(ROWS), exact, dtype)
            last = loop.steps - 1
            carry = lax.fori_loop(jnp.int32(0), last, absorb, carry)
            ping_pong.pass_on()
            v, out = value_stream.wait(last)["v"], carry.out
            for at, tile in zip(parts, carry.weights, strict=True):
                out = plus_product(out, tile, _part(v, at), scratch_part(at))
            return out, carry.highest, carry.total

        lowest = zeros(ROWS) + MIN_SCORE_BASE_2
        out, highest, total = lax.cond(
            loop.steps > 0, attend, lambda: (zeros(ROWS, dim), lowest, zeros(ROWS))
        )
        left_out = loop.row_term()
        if left_out is not None:
            highest = highest + left_out
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
