"""Kernels for Hopper GPUs (Pallas, Mosaic GPU): which calls they serve.

The kernels need a recent JAX. They are imported on first use.
"""

from __future__ import annotations

from functools import cache, partial

import jax

from posenc.backend import Call, PositionScheme
from posenc_jax.fused.devices import Device
from posenc_jax.fused.gradients import Kernels
from posenc_jax.fused.mosaic_gpu.jax_version import OLDEST, cuda_runtime
from posenc_jax.fused.plan import Plan
from posenc_jax.fused.reads import BiasReads
from posenc_jax.fused.target import Target

HEAD_DIMS = (64, 128)
DTYPES = ("bfloat16", "float16")
BLOCK = 128
# Their ptxas compiles causal masks wrongly, says JAX's own attention for Hopper, and refuses them.
# 12.9.1 is right, but reports the same version as 12.9.0.
MISCOMPILING = ((12, 8), (12, 9))


class Hopper(Device):
    """NVIDIA GPUs of compute capability 9.x."""

    reads_far = True

    def unsupported(self, target: Target) -> str | None:
        if jax.__version_info__[:2] < OLDEST:
            return f"kernels for GPUs need JAX 0.11 or newer, this is JAX {jax.__version__}"
        if target.capability.split(".")[0] != "9":
            return (
                "kernels for GPUs use wgmma instructions of compute capability 9.x (Hopper); "
                f"this GPU has {target.capability or 'none that JAX reports'}"
            )
        cuda = None if target.interpreted else cuda_runtime()
        if cuda in MISCOMPILING:
            return (
                f"this is CUDA {cuda[0]}.{cuda[1]}; ptxas of CUDA 12.8 and 12.9.0 compiles masks "
                "wrongly. Kernels for GPUs need CUDA 13 or newer, or a version before 12.8"
            )
        return None

    def unsupported_call(self, call: Call) -> str | None:
        q, k, v = call.q, call.k, call.v
        if not q.dtype == k.dtype == v.dtype:
            return f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}"
        if str(q.dtype) not in DTYPES:
            return f"q, k and v are {q.dtype}; kernels for GPUs take {' and '.join(DTYPES)}"
        for name, size in (("q and k have", q.shape[3]), ("v has", v.shape[3])):
            if size not in HEAD_DIMS:
                accepted = " and ".join(map(str, HEAD_DIMS))
                return f"{name} head_dim {size}; kernels for GPUs take {accepted}"
        if q.shape[3] != v.shape[3]:
            return (
                f"q has head_dim {q.shape[3]}, v has {v.shape[3]}; kernels for GPUs take equal ones"
            )
        if 0 in (*q.shape, *k.shape):
            return f"q has shape {q.shape} and k {k.shape}; kernels take no empty arrays"
        return None

    def unsupported_bias(self, scheme: PositionScheme, reads: BiasReads) -> str | None:
        return _why_not_lowered(Plan.of_one_block(scheme, reads, BLOCK))

    def block(self, call: Call) -> int:
        return BLOCK

    def kernels(self, *, interpreted: bool) -> Kernels:
        return _kernels(interpreted)


DEVICE = Hopper()


@cache
def _why_not_lowered(plan: Plan) -> str | None:
    from posenc_jax.fused.mosaic_gpu.check_lowering import lower

    try:
        lower(plan)
    except Exception as error:  # a bias may be third-party code, and fail in any way
        first = str(error).strip().partition("\n")[0]
        name = type(plan.scheme).__name__
        return f"the bias of {name} does not lower inside a kernel: {type(error).__name__}: {first}"
    return None


@cache  # programs are cached by these functions
def _kernels(interpreted: bool) -> Kernels:
    from posenc_jax.fused.mosaic_gpu.forward import forward
    from posenc_jax.fused.mosaic_gpu.keys import d_keys
    from posenc_jax.fused.mosaic_gpu.queries import d_queries
    from posenc_jax.fused.mosaic_gpu.table import d_table

    return Kernels(
        partial(forward, interpreted=interpreted),
        partial(d_queries, interpreted=interpreted),
        partial(d_keys, interpreted=interpreted),
        partial(d_table, interpreted=interpreted),
    )
