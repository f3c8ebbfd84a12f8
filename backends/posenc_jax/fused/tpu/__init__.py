"""Kernels for TPUs: which calls they serve.

``forward``, ``queries``, ``keys`` and ``table`` are the kernels. ``grid`` orders their steps,
``operands`` names what they read, ``tile`` computes on one tile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import sharding
from jax.experimental.pallas import tpu as pltpu

from posenc.backend import Call, PositionScheme
from posenc_jax.fused.devices import Device
from posenc_jax.fused.gradients import Kernels, Residuals
from posenc_jax.fused.plan import Integers, Operands, Plan
from posenc_jax.fused.reads import BiasReads
from posenc_jax.fused.shapes import array_type
from posenc_jax.fused.target import Target
from posenc_jax.fused.tpu.forward import forward as forward_kernel
from posenc_jax.fused.tpu.keys import d_keys
from posenc_jax.fused.tpu.queries import d_queries
from posenc_jax.fused.tpu.table import d_table

BLOCKS = (512, 256, 128)  # powers of two: tiles of a table are made by doubling
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float32")
OLDEST = (0, 10)  # JAX
_MAX_PREFETCHED = 2**17  # half of the 2**20 bytes of memory for scalars


class Tpu(Device):
    """TPUs of every generation that Pallas lowers for."""

    reads_far = True

    def unsupported(self, target: Target) -> str | None:
        if jax.__version_info__ < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            return f"kernels for TPUs need JAX {oldest}, this is {jax.__version__}"
        return None

    def unsupported_call(self, call: Call) -> str | None:
        for name in ("q", "k", "v"):
            array = getattr(call, name)
            if array.dtype.name not in DTYPES:
                return f"kernels for TPUs take {' or '.join(DTYPES)}, {name} is {array.dtype}"
            if array.dtype != call.q.dtype:
                return f"q, k and v differ in dtype: {call.q.dtype}, {call.k.dtype}, {call.v.dtype}"
            if array.shape[3] not in HEAD_DIMS:
                accepted = ", ".join(map(str, HEAD_DIMS))
                return f"kernels for TPUs take head_dim {accepted}; {name} has {array.shape[3]}"
        batch, heads, q_len, _ = call.q.shape
        size = self.block(call)
        q_blocks, k_blocks = -(-q_len // size), -(-call.k.shape[2] // size)
        # Ranges of blocks, and a walk over all heads.
        count = 2 * heads * (batch * (q_blocks + k_blocks) + max(q_blocks, k_blocks))
        if count > _MAX_PREFETCHED:
            return (
                f"batch {batch}, {heads} heads and {q_blocks} + {k_blocks} blocks need {count} "
                f"integers before a kernel starts, kernels for TPUs take up to {_MAX_PREFETCHED}"
            )
        return None

    def unsupported_bias(self, scheme: PositionScheme, reads: BiasReads) -> str | None:
        return _why_not_lowered(scheme, reads)

    def block(self, call: Call) -> int:
        """The largest block that queries fill."""
        return next((n for n in BLOCKS if n <= call.q.shape[2]), BLOCKS[-1])

    def kernels(self, *, interpreted: bool) -> Kernels:
        return _kernels(interpreted)


DEVICE = Tpu()


@cache  # programs are cached by these functions
def _kernels(interpreted: bool) -> Kernels:
    return Kernels(
        partial(forward_kernel, interpreted=interpreted),
        partial(d_queries, interpreted=interpreted),
        partial(d_keys, interpreted=interpreted),
        partial(d_table, interpreted=interpreted),
    )


@lru_cache(256)
def _why_not_lowered(scheme: PositionScheme, reads: BiasReads) -> str | None:
    """Why the backward kernels do not lower with a bias; None if they do.

    They are lowered on one block, and compute all that the forward kernel computes of a bias. The
    device's compiler does not run.
    """
    size, dim = BLOCKS[-1], HEAD_DIMS[0]
    plan = Plan.of_one_block(scheme, reads, size)

    def real(*shape: int) -> Any:
        return array_type(shape, jnp.float32)

    vectors, per_row = real(1, 1, size, dim), real(1, 1, size)
    operands = Operands(
        q=vectors,
        k=vectors,
        v=vectors,
        head_scalars=real(1, max(1, len(plan.reads.scalars))),
        table=None,
        far=None,
        q_feature=per_row if reads.query else None,
        k_feature=per_row if reads.key else None,
    )
    ranges: Any = array_type((2, 1, 1, 1), jnp.int32)
    integers = Integers(None, None, None, None, ranges, ranges)
    residuals = Residuals(vectors, per_row, per_row)

    def backward(*given: Any) -> Any:
        kernels = _kernels(interpreted=False)
        return kernels.d_queries(plan, *given), kernels.d_keys(plan, *given)

    try:
        with abstract_tpu():
            traced = jax.jit(backward).trace(operands, integers, residuals)
            traced.lower(lowering_platforms=("tpu",))
    except Exception as error:  # a bias may be third-party code, and fail in any way
        first = str(error).strip().split("\n")[0]
        return f"the bias of {type(scheme).__name__} does not lower for a TPU: {first}"
    return None


def abstract_tpu() -> AbstractContextManager[Any]:
    """A context in which Pallas lowers for a TPU, even if none is present."""
    if pltpu.is_tpu_device():
        return nullcontext()
    device = sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device))
