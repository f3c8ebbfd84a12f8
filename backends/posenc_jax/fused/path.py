"""The path ``"pallas"``: which kernels serve a call, and in which form they take its bias."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from posenc.call import Call
from posenc.evaluate import is_gated
from posenc.lowerings import by_key, has_bias
from posenc.protocol import Namespace, PositionScheme
from posenc_jax.fused.gradients import NAME, Kernels, attend
from posenc_jax.fused.plan import Form, numbers_read, planned
from posenc_jax.fused.target import Target, target
from posenc_jax.loops import varying_over
from posenc_jax.orders import reverse_only

FEW_QUERIES = 16  # most of a block of queries would be padding
# Modules of kernels; imported when they are asked for, because each needs its own JAX.
_MODULES = {"gpu": "posenc_jax.fused.mosaic_gpu", "tpu": "posenc_jax.fused.tpu"}


class Module(Protocol):
    """Kernels for one kind of device."""

    def why_not_here(self, here: Target) -> str | None:
        """Why there are no kernels on this device, or in this JAX."""

    def refuses(self, call: Call) -> str | None:
        """Why no kernel takes shapes or dtypes of a call."""

    def why_not_lowered(self, call: Call, here: Target) -> str | None:
        """Why the scheme's own bias cannot be computed inside a kernel; None if it can."""

    def block(self, call: Call, form: Form) -> int:
        """So many queries, and so many keys, make a block."""

    def kernels(self, here: Target) -> Kernels:
        """The kernels."""


class _Keyed(PositionScheme):
    """A bias ``w(k) - w(q)``, its numbers given as coordinates; equal to any other of them."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _Keyed

    def __hash__(self) -> int:
        return hash(_Keyed)

    def gate(self, x: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        raise AssertionError("coordinates are given")

    def bias(self, q: Array, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        return k - q

    def key_bias(self, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        return k


def fused(call: Call) -> Array:
    """``(B, H, Q, Dv)`` in q's dtype."""
    return fused_with_logsumexp(call)[0]


def fused_with_logsumexp(call: Call) -> tuple[Array, Array]:
    """``(B, H, Q, Dv)`` in q's dtype, and the log of the sum of ``exp(score)``, ``(B, H, Q)``."""
    here = target()
    module = _module(here)
    call, form = _formed(call, module, here)
    plan, operands, places = planned(call, form, module.block(call, form))
    out, logsumexp = attend(module.kernels(here), plan, reverse_only(operands, NAME), places)
    return out[:, :, : plan.q_len], logsumexp[:, :, : plan.q_len]


def refuses(call: Call) -> str | None:
    """Why no kernel serves a call on this device."""
    here = target()
    if here.platform not in _MODULES:
        return f"kernels are for {' and '.join(_MODULES)}, the device is a {here.platform}"
    if axes := varying_over(call.q):
        return (
            f"a kernel cannot tell that its results vary over {sorted(map(str, axes))}: give "
            "jax.shard_map check_vma=False"
        )
    if call.q_seg is not None and (wide := _wide_segments(call)):
        return f"kernels compare segments of 32 bits, {wide} has 64: cast it, if its values fit"
    module = _module(here)
    why = module.why_not_here(here) or module.refuses(call)
    if why is not None:
        return why
    try:
        _formed(call, module, here)
    except NotImplementedError as error:
        return str(error)
    return None


def avoided(call: Call) -> str | None:
    """Why ``"auto"`` passes by."""
    if call.q.shape[2] < FEW_QUERIES:
        return f"{call.q.shape[2]} queries are few, and the rest of a block would be padding"
    if target().platform in _MODULES:
        return (
            "its kernels were compiled and interpreted, but no device has run them yet: "
            "benchmarks/gpu_check.py --framework jax checks them on yours"
        )
    return None


def _wide_segments(call: Call) -> str:
    sides = {"q_seg": call.q_seg, "k_seg": call.k_seg}
    return next((name for name, seg in sides.items() if seg.dtype.itemsize > 4), "")


def _module(here: Target) -> Module:
    module: Any = importlib.import_module(_MODULES[here.platform])
    return module


def _formed(call: Call, module: Module, here: Target) -> tuple[Call, Form]:
    """The call, and the form in which a kernel takes its bias; a key bias stands for others.

    Raises
    ------
    NotImplementedError
        There is none.
    """
    if not _has_some(call):
        return call, "none"
    name = type(call.scheme).__name__
    reasons = []
    if numbers_read(call) is None:
        reasons.append(f"the bias of {name} reads params of more than one number a head")
    elif (why := module.why_not_lowered(call, here)) is None:
        return call, "pairs"
    else:
        reasons.append(why)
    if call.scheme.relative and call.aligned and not is_gated(call.scheme):
        return call, "table"
    reasons.append(
        "a table of distances needs the default positions"
        if call.scheme.relative
        else f"{name} is not relative, so there is no table of distances"
    )
    if (keyed := _keyed(call)) is not None:
        return keyed, "pairs"
    reasons.append("there is no key bias" if call.causal else "a key bias needs a causal mask")
    raise NotImplementedError("; ".join(reasons))


def _has_some(call: Call) -> bool:
    return has_bias(call.scheme) and jax.eval_shape(call.bias) is not None


def _keyed(call: Call) -> Call | None:
    """The call with its key bias as coordinates of another scheme; None without one.

    What softmax cannot see is taken off each row, its bias at the query's own position, so that
    large numbers cancel before scores are added to them.
    """
    shape = call.q.shape[:2]
    of_keys = by_key(call)
    if of_keys is None:
        return None
    of_queries = by_key(replace(call, k_pos=call.q_pos, k_coords=call.q_coords))
    assert of_queries is not None
    q_coords, k_coords = (jnp.broadcast_to(w, (*shape, w.shape[-1])) for w in (of_queries, of_keys))
    return replace(call, scheme=_Keyed(), arrays={}, q_coords=q_coords, k_coords=k_coords)
