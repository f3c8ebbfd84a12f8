"""Kernels for TPUs: which calls they take.

``passes`` are the kernels, ``grid`` says how they walk over tiles, ``tile`` what they
compute on one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import sharding
from jax.experimental.pallas import tpu as pltpu

from posenc.backend import (
    Call,
    PositionScheme,
)
from posenc_jax.fused.gradients import Kernels, Rows
from posenc_jax.fused.plan import Form, Operands, Places, Plan, Read, read_by_bias
from posenc_jax.fused.target import Target
from posenc_jax.fused.tpu.passes import d_keys, d_queries, d_table, forward

BLOCKS = (512, 256, 128)  # powers of two: tiles of a table are made by doubling
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float32")
LEAST_JAX = (0, 10)
_BOUNDS = 2**17  # half of the 2**20 bytes in which numbers that steer a kernel lie


def why_not_here(here: Target) -> str | None:
    """Why there are no kernels in this JAX."""
    if jax.__version_info__ < LEAST_JAX:
        least = ".".join(map(str, LEAST_JAX))
        return f"kernels for TPUs need JAX {least}, this is {jax.__version__}"
    return None


def refuses(call: Call) -> str | None:
    """Why no kernel takes shapes or dtypes of a call."""
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
    size = block(call, "none")
    q_blocks, k_blocks = -(-q_len // size), -(-call.k.shape[2] // size)
    bounds = 2 * batch * heads * (q_blocks + k_blocks)
    if bounds > _BOUNDS:
        return (
            f"batch {batch}, {heads} heads and {q_blocks} + {k_blocks} blocks need {bounds} bounds "
            f"of blocks, kernels for TPUs take up to {_BOUNDS}"
        )
    return None


def block(call: Call, form: Form) -> int:
    """The largest block that queries fill."""
    return next((n for n in BLOCKS if n <= call.q.shape[2]), BLOCKS[-1])


def why_not_lowered(call: Call, here: Target) -> str | None:
    """Why the scheme's own bias cannot be computed inside a kernel; None if it can."""
    return _why_not_lowered(call.scheme, read_by_bias(call))


def kernels(here: Target) -> Kernels:
    """The kernels."""
    return _kernels(here.interpreted)


@cache
def _kernels(interpreted: bool) -> Kernels:
    return Kernels(*(partial(f, interpreted) for f in (forward, d_queries, d_keys, d_table)))


@lru_cache(256)
def _why_not_lowered(scheme: PositionScheme, read: Read) -> str | None:
    """Lowers the kernels on one block; the compiler of the device is not asked."""
    size, dim = BLOCKS[-1], HEAD_DIMS[0]
    plan = Plan.trial(scheme, read, size)

    def real(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    vectors, of_rows = real(1, 1, size, dim), real(1, 1, size)
    numbers = real(1, max(1, len(read.learned + read.fixed)))
    features = (of_rows if names else None for names in (read.query, read.key))
    bounds: Any = jax.ShapeDtypeStruct((2, 1, 1, 1), jnp.int32)
    operands = Operands(vectors, vectors, vectors, numbers, None, *features)
    places = Places(None, None, None, None, bounds, bounds)
    rows = Rows(vectors, of_rows, of_rows)

    def both(operands: Operands, places: Places, rows: Rows) -> Any:
        found = _kernels(interpreted=False)
        return found.d_queries(plan, operands, places, rows), found.d_keys(
            plan, operands, places, rows
        )

    try:
        with _on_a_tpu():
            jax.jit(both).trace(operands, places, rows).lower(lowering_platforms=("tpu",))
    except Exception as error:  # whatever a scheme does that a kernel cannot
        first = str(error).strip().split("\n")[0]
        return f"the bias of {type(scheme).__name__} does not lower for a TPU: {first}"
    return None


def _on_a_tpu() -> AbstractContextManager[Any]:
    """Where Pallas, which asks what device it lowers for, is told of a TPU if none is here."""
    if pltpu.is_tpu_device():
        return nullcontext()
    device = sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device))
