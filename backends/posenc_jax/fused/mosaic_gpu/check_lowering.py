"""Check whether a kernel for Hopper GPUs can compute a bias, by lowering a small kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.fused.mosaic_gpu import namespace
from posenc_jax.fused.mosaic_gpu.jax_version import WGMMA, plgpu
from posenc_jax.fused.mosaic_gpu.tile import ROWS, bias_positions, d_by_feature, d_by_scalar
from posenc_jax.fused.plan import Plan, Tokens
from posenc_jax.fused.shapes import array_type


def lower(plan: Plan) -> None:
    """Lower the bias of a plan and its derivatives for a GPU that need not be present.

    And the key bias, if kernels may add that instead.

    Raises
    ------
    Exception
        Any that the scheme or Mosaic GPU raises.
    """
    count = len(plan.reads.scalars)

    def kernel(scalars_ref: Any, out: Any, shared: Any) -> None:
        head_scalars = [scalars_ref[n] for n in range(count)]
        shape = (ROWS, ROWS)
        iota = [plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) for axis in (0, 1)]
        q, k = (
            Tokens(
                bias_positions(plan, pos),
                None if feature is None else pos.astype(jnp.float32),
            )
            for pos, feature in zip(iota, (plan.reads.q_feature, plan.reads.k_feature), strict=True)
        )
        total = plan.bias(head_scalars, q, k, namespace)
        if plan.reads.by_key:
            total = total + plan.key_bias(head_scalars, k.pos, namespace)
        for n in range(len(plan.reads.trainable)):
            total = total + d_by_scalar(plan, head_scalars, n, q, k)
        if plan.reads.q_feature is not None:
            total = total + d_by_feature(plan, head_scalars, q, k, "query")
        if plan.reads.k_feature is not None:
            total = total + d_by_feature(plan, head_scalars, q, k, "key")
        shared[...] = (plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA) + total).sum(axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, out)
        plgpu.wait_smem_to_gmem(0)

    small_kernel = plgpu.kernel(
        kernel,
        out_type=array_type((ROWS,), jnp.float32),
        scratch_types=(plgpu.SMEM((ROWS,), jnp.float32),),
    )
    scalars = array_type((max(count, 1),), jnp.float32)
    jax.jit(small_kernel).trace(scalars).lower(lowering_platforms=("cuda",))
