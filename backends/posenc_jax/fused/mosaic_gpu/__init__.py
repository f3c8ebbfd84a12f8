"""Kernels for Hopper GPUs (Pallas, Mosaic GPU): what they serve, and why not the rest.

The kernels themselves need a recent JAX and are imported when one of them is asked for.
"""

from __future__ import annotations

from functools import cache, partial

import jax

from posenc.backend import (
    Call,
)
from posenc_jax.fused.gradients import Kernels
from posenc_jax.fused.mosaic_gpu.jax_version import OLDEST
from posenc_jax.fused.plan import Form, Plan, read_by_bias
from posenc_jax.fused.target import Target

HEAD_DIMS = (64, 128)
DTYPES = ("bfloat16", "float16")
BLOCK = 128


def why_not_here(here: Target) -> str | None:
    """Why there are no kernels on this device, or in this JAX."""
    if jax.__version_info__[:2] < OLDEST:
        return f"kernels for GPUs need JAX 0.11 or newer, this is JAX {jax.__version__}"
    if here.capability.split(".")[0] != "9":
        return (
            "kernels for GPUs are made of wgmma instructions, which compute capability 9.x "
            f"(Hopper) has; this GPU has {here.capability or 'none that JAX tells'}"
        )
    return None


def refuses(call: Call) -> str | None:
    """Why no kernel takes shapes or dtypes of a call."""
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
        return f"q has head_dim {q.shape[3]}, v has {v.shape[3]}; kernels for GPUs take equal ones"
    if 0 in (*q.shape, *k.shape):
        return f"q has shape {q.shape} and k {k.shape}; a kernel needs some of each"
    return None


def why_not_lowered(call: Call, here: Target) -> str | None:
    """Why the scheme's own bias cannot be computed inside a kernel; None if it can."""
    return _why_not_lowered(Plan.trial(call.scheme, read_by_bias(call), BLOCK))


@cache
def _why_not_lowered(plan: Plan) -> str | None:
    from posenc_jax.fused.mosaic_gpu.check_lowering import lower

    try:
        lower(plan)
    except Exception as error:  # a bias is anybody's code, and so is the way in which it fails
        first = str(error).strip().partition("\n")[0]
        name = type(plan.scheme).__name__
        return f"the bias of {name} does not lower inside a kernel: {type(error).__name__}: {first}"
    return None


def block(call: Call, form: Form) -> int:
    """So many queries, and so many keys, make a block."""
    return BLOCK


@cache
def kernels(here: Target) -> Kernels:
    """The kernels."""
    from posenc_jax.fused.mosaic_gpu.forward import forward
    from posenc_jax.fused.mosaic_gpu.keys import d_keys
    from posenc_jax.fused.mosaic_gpu.queries import d_queries
    from posenc_jax.fused.mosaic_gpu.table import d_table

    chosen = (forward, d_queries, d_keys, d_table)
    return Kernels(*(partial(kernel, interpreted=here.interpreted) for kernel in chosen))
