"""The implementation ``"pallas"``: which kernels serve a call, and how they take its bias."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import (
    Call,
    FirstTokens,
    Mask,
    Namespace,
    PositionScheme,
    Role,
    Side,
    bias_by_key,
    has_bias,
    has_bias_by_distance,
)
from posenc_jax.derivatives import forbid_forward_mode
from posenc_jax.fused.gradients import NAME, Kernels, attend
from posenc_jax.fused.plan import FLOOR, Form, planned, why_not_pairs
from posenc_jax.fused.target import Target, target
from posenc_jax.trees import varying_axes

FEW_QUERIES = 16  # most of a block of queries would be padding
# Modules of kernels; imported when they are asked for, because each needs its own JAX.
_MODULES = {"gpu": "posenc_jax.fused.mosaic_gpu", "tpu": "posenc_jax.fused.tpu"}


class Module(Protocol):
    """Kernels for one kind of device."""

    def why_not_here(self, here: Target) -> str | None:
        """Why there are no kernels on this device, or in this JAX."""

    def unsupported(self, call: Call) -> str | None:
        """Why no kernel takes shapes or dtypes of a call."""

    def why_not_lowered(self, call: Call, here: Target) -> str | None:
        """Why the scheme's own bias cannot be computed inside a kernel; None if it can."""

    def block(self, call: Call, form: Form) -> int:
        """So many queries, and so many keys, make a block."""

    def kernels(self, here: Target) -> Kernels:
        """The kernels."""


class _Keyed(PositionScheme):
    """A bias ``w(k) - w(q)`` of features that are given; equal to any other of them."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _Keyed

    def __hash__(self) -> int:
        return hash(_Keyed)

    def hidden_features(
        self, x: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        raise AssertionError("features are given")

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        found: Array = params.key["w"] - params.query["w"]
        return found

    def key_bias(self, k: Array, *, params: Any, xp: Namespace) -> Array:
        found: Array = params.key["w"]
        return found


def fused(call: Call) -> tuple[Array, Array | None]:
    """``(B, H, Q, Dv)`` in q's dtype, and the log of the sum of ``exp(score)``, ``(B, H, Q)``.

    The second is the lowest finite number where nothing is seen, and None as ``without_lse`` says.
    """
    here = target()
    module = _module(here)
    formed, form = _formed(call, module, here)
    plan, operands, places = planned(formed, form, module.block(formed, form))
    out, lse = attend(module.kernels(here), plan, forbid_forward_mode(operands, NAME), places)
    out, lse = out[:, :, : plan.q_len], lse[:, :, : plan.q_len]
    if isinstance(formed.scheme, _Keyed):
        return out, None
    return out, jnp.where(lse <= FLOOR, float(jnp.finfo(lse.dtype).min), lse)


def without_lse(call: Call) -> str | None:
    """Why there is no log-sum-exp of a call that a kernel serves."""
    here = target()
    for part in call.regions or (call,):
        formed, _ = _formed(part, _module(here), here)
        if isinstance(formed.scheme, _Keyed):
            return (
                f"a key bias stands for that of {type(part.scheme).__name__} in kernels, which "
                "changes the sum of each row"
            )
    return None


def unsupported(call: Call) -> str | None:
    """Why no kernel serves a call on this device."""
    here = target()
    if here.platform not in _MODULES:
        return f"kernels are for {' and '.join(_MODULES)}, the device is a {here.platform}"
    if axes := varying_axes(call.q):
        return (
            f"a kernel cannot tell that its results vary over {sorted(map(str, axes))}: give "
            "jax.shard_map check_vma=False"
        )
    if (why := _brought(call)) is not None:
        return why
    if call.query.seg is not None and (wide := _wide_segments(call)):
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


def not_preferred(call: Call) -> str | None:
    """Why ``"auto"`` passes by."""
    if call.q.shape[2] < FEW_QUERIES:
        return f"{call.q.shape[2]} queries are few, and the rest of a block would be padding"
    if target().platform in _MODULES:
        return (
            "its kernels were compiled and interpreted, but no device has run them yet: "
            "benchmarks/gpu_check.py --framework jax checks them on yours"
        )
    return None


def _brought(call: Call) -> str | None:
    """Why a kernel cannot do with a call what its caller asks for beside the scheme."""
    if call.softcap is not None:
        return f"kernels do not cap scores, softcap is {call.softcap}"
    if call.extra_bias is not None:
        return "kernels read no bias of pairs, bias is given"
    if call.mask is not None:
        own = call.mask.function if isinstance(call.mask, Mask) else None
        if isinstance(own, FirstTokens):
            return "kernels know one window, and sink_tokens are not in that of a region"
        return "kernels know positions, segments and windows only, mask is given"
    return None


def _wide_segments(call: Call) -> str:
    sides = {"q_seg": call.query.seg, "k_seg": call.key.seg}
    return next(
        (name for name, seg in sides.items() if seg is not None and seg.dtype.itemsize > 4), ""
    )


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
    if call.query.places is not None:
        name = type(call.scheme).__name__
        raise NotImplementedError(
            f"the bias of {name} reads the places given as q_axes and k_axes, kernels take none"
        )
    reasons = []
    if (needs := why_not_pairs(call)) is not None:
        reasons.append(needs)
    elif (why := module.why_not_lowered(call, here)) is None:
        return call, "pairs"
    else:
        reasons.append(why)
    if has_bias_by_distance(call):
        return call, "table"
    reasons.append(_why_no_table(call))
    if (keyed := _keyed(call)) is not None:
        return keyed, "pairs"
    reasons.append("there is no key bias" if call.causal else "a key bias needs a causal mask")
    raise NotImplementedError("; ".join(reasons))


def _why_no_table(call: Call) -> str:
    name = type(call.scheme).__name__
    if not call.scheme.relative:
        return f"{name} is not relative, so there is no table of distances"
    if not call.in_order:
        return "a table of distances needs the default positions"
    return f"{name} has features of tokens, so there is no table of distances"


def _has_some(call: Call) -> bool:
    return has_bias(call.scheme) and jax.eval_shape(call.bias) is not None


def _keyed(call: Call) -> Call | None:
    """The call with its key bias as features of another scheme; None without one.

    What softmax cannot see is taken off each row, its bias at the query's own position, so that
    large numbers cancel before scores are added to them.
    """
    of_keys = bias_by_key(call)
    if of_keys is None:
        return None
    of_queries = _at_queries(call, of_keys)
    (batch, heads), sides = call.q.shape[:2], []
    for side, w in ((call.query, of_queries), (call.key, of_keys)):
        wide = jnp.broadcast_to(w, (batch, heads, w.shape[-1]))
        sides.append(side._replace(features={"w": wide}))
    return replace(call, scheme=_Keyed(), arrays={}, query=sides[0], key=sides[1])


def _at_queries(call: Call, of_keys: Array) -> Array:
    """The key bias where queries stand, ``(B or 1, H or 1, Q)``; 0 where that is not known."""
    if call.aligned:
        return of_keys[..., call.k.shape[2] - call.q.shape[2] :]
    # Sums have the same names on both sides; other features of keys may be of keys alone.
    there = Side(call.query.pos, None, None, call.query.features)
    try:
        found = bias_by_key(replace(call, key=there))
    except KeyError:
        found = None
    return jnp.zeros((1, 1, call.q.shape[2])) if found is None else found
