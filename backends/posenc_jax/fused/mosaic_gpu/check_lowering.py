"""Whether a bias can be computed inside a kernel for Hopper GPUs: by lowering a small one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.fused.mosaic_gpu import namespace
from posenc_jax.fused.mosaic_gpu.jax_version import WGMMA, plgpu
from posenc_jax.fused.mosaic_gpu.tile import (
    ROWS,
    by_feature,
    by_number,
)
from posenc_jax.fused.plan import Plan, Tokens


def lower(plan: Plan) -> None:
    """Lower the bias of a plan, and its derivatives, for a GPU that need not be here.

    Raises
    ------
    Exception
        Whatever the scheme or Mosaic GPU raises.
    """
    count = len(plan.learned + plan.fixed)

    def kernel(numbers_ref: Any, out: Any, shared: Any) -> None:
        numbers = [numbers_ref[n] for n in range(count)]
        shape = (ROWS, ROWS)
        at = [plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) for axis in (0, 1)]
        q, k = (
            Tokens(pos, None if name is None else pos.astype(jnp.float32))
            for pos, name in zip(at, (plan.q_reads, plan.k_reads), strict=True)
        )
        found = plan.bias(numbers, q, k, namespace)
        for n in range(len(plan.learned)):
            found = found + by_number(plan, numbers, n, q, k)
        if plan.q_reads is not None:
            found = found + by_feature(plan, numbers, q, k, "query")
        if plan.k_reads is not None:
            found = found + by_feature(plan, numbers, q, k, "key")
        shared[...] = (plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA) + found).sum(axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, out)
        plgpu.wait_smem_to_gmem(0)

    row_sums = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    trial = plgpu.kernel(
        kernel, out_type=row_sums, scratch_types=(plgpu.SMEM((ROWS,), jnp.float32),)
    )
    given = jax.ShapeDtypeStruct((max(count, 1),), jnp.float32)
    jax.jit(trial).trace(given).lower(lowering_platforms=("cuda",))
