"""The implementation ``"pallas"``: which kernels serve a call, and the form of its bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import (
    Call,
    FeatureSpec,
    LogSumExp,
    Mask,
    Namespace,
    Planned,
    PositionScheme,
    Refusal,
    Tokens,
    bias_by_key,
    has_bias,
    has_bias_by_distance,
)
from posenc_jax.derivatives import forbid_forward_mode
from posenc_jax.fused.devices import PLATFORMS, Device, device_for
from posenc_jax.fused.gradients import NAME, Kernels, attend
from posenc_jax.fused.inputs import inputs_of
from posenc_jax.fused.plan import MIN_SCORE, Form
from posenc_jax.fused.reads import BiasReads, trace_bias_reads, why_not_elementwise
from posenc_jax.fused.shapes import is_symbolic
from posenc_jax.fused.target import target
from posenc_jax.operations import is_cheaper_by_distance
from posenc_jax.trees import varying_axes

FEW_QUERIES = 16  # with fewer, most of a block of queries would be padding


class _KeyBias(PositionScheme):
    """The bias ``w(k) - w(q)`` of a feature that is given; all instances are equal."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _KeyBias

    def __hash__(self) -> int:
        return hash(_KeyBias)

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"w": FeatureSpec(_given, of="key", cumulative=True)}

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        bias: Array = params.key["w"] - params.query["w"]
        return bias

    def key_bias(self, k: Array, *, params: Any, xp: Namespace) -> Array:
        bias: Array = params.key["w"]
        return bias


def _given(x: Array, *, params: Any, xp: Namespace) -> Array:
    raise AssertionError("the feature is given")


class Served(NamedTuple):
    """How kernels serve the bias of a call.

    Attributes
    ----------
    form
        The form of the bias.
    reads
        What it reads, if it is elementwise.
    key_bias
        The key bias at the queries and at the keys, if it replaces the bias; or None.
    """

    form: Form
    reads: BiasReads = BiasReads()
    key_bias: tuple[Array, Array] | None = None

    def call(self, call: Call) -> Call:
        """The call that kernels compute."""
        return call if self.key_bias is None else _of_key_bias(call, *self.key_bias)


def plan(call: Call) -> Planned | Refusal:
    """The kernels that serve a call on this device, or why none does."""
    here = target()
    if here.platform not in PLATFORMS:
        accepted = " and ".join(PLATFORMS)
        return Refusal(f"kernels are for {accepted}, the device is a {here.platform}")
    if axes := varying_axes(call.q):
        return Refusal(
            f"a kernel cannot declare that its results vary over {sorted(map(str, axes))}: give "
            "jax.shard_map check_vma=False"
        )
    if (why := _unsupported_argument(call)) is not None:
        return Refusal(why)
    device = device_for(here)
    why = device.unsupported(here) or device.unsupported_call(call)
    if why is not None:
        return Refusal(why)
    served = choose_form(call, device)
    if isinstance(served, Refusal):
        return served
    without_lse = None
    if served.key_bias is not None:
        without_lse = (
            f"kernels replace the bias of {type(call.scheme).__name__} by its key bias, which "
            "changes the sum of each row"
        )
    kernels = device.kernels(interpreted=here.interpreted)
    return Planned(partial(_run, served, device, kernels), without_lse)


def _run(
    served: Served, device: Device, kernels: Kernels, call: Call
) -> tuple[Array, LogSumExp | None]:
    """Output ``(B, H, Q, Dv)`` in q's dtype, and the log-sum-exp of the scores.

    With a key bias instead of the bias, the log-sum-exp is None.
    """
    plan, operands, integers = inputs_of(
        served.call(call), served.form, served.reads, device.block(call),
        reads_far=device.reads_far,
    )  # fmt: skip
    out, lse = attend(kernels, plan, forbid_forward_mode(operands, NAME), integers)
    out, lse = out[:, :, : plan.q_len], lse[:, :, : plan.q_len]
    if served.key_bias is not None:
        return out, None
    return out, LogSumExp.of_kernel(lse, MIN_SCORE, jnp)


def not_preferred(call: Call) -> str | None:
    """Why ``"auto"`` skips the kernels; None if it does not."""
    if is_symbolic(call):
        return "a length or the batch is symbolic, and the kernels' grid needs numbers"
    if call.q.shape[2] < FEW_QUERIES:
        return f"{call.q.shape[2]} queries are few, and the rest of a block would be padding"
    if (kind := _not_run_yet(call)) is not None:
        return (
            f"its kernels were compiled and interpreted, but no device has run them {kind} yet: "
            "benchmarks/gpu_check.py --framework jax checks them on yours"
        )
    return None


def _not_run_yet(call: Call) -> str | None:
    """What kind of call no device has run, as docs/performance.md says; None if one has."""
    here = target()
    if (here.platform, here.capability) != ("gpu", "9.0"):
        return "on such a device"
    if jax.device_count() > 1:
        return f"with {jax.device_count()} devices, over which a compiler does not split them,"
    if call.q.dtype != jnp.bfloat16:
        return f"in {call.q.dtype}"
    if call.window is not None or call.query.seg is not None or not (call.causal and call.aligned):
        return "but for causal attention at default positions, without a window and segments,"
    return None


def _unsupported_argument(call: Call) -> str | None:
    """Why kernels cannot serve what the caller asks for in addition to the scheme."""
    if call.softcap is not None:
        return f"kernels do not cap scores, softcap is {call.softcap}"
    if call.extra_bias is not None:
        return "kernels compute only the scheme's bias, bias is given"
    if not call.mask.plain:
        if call.mask.array is None and all(type(part) is Mask for part in call.mask.parts):
            return "kernels have one window, and a mask of first tokens in a region needs two"
        return "kernels mask by positions, segments and windows only, mask is given"
    if wide := _wide_segments(call):
        return f"kernels compare segments of 32 bits, {wide} has 64: cast it, if its values fit"
    return None


def _wide_segments(call: Call) -> str | None:
    """The name of segments with more than 32 bits, or None."""
    sides = {"tokens.seg": call.key.seg, "queries.seg": call.query.seg}
    wide = (name for name, seg in sides.items() if seg is not None and seg.dtype.itemsize > 4)
    return next(wide, None)


def choose_form(call: Call, device: Device) -> Served | Refusal:
    """The form of a bias for kernels, or all reasons why it has none."""
    if not _has_bias(call):
        return Served("none")
    if call.query.places is not None:
        name = type(call.scheme).__name__
        return Refusal(f"the bias of {name} reads the places of tokens, kernels take none")
    if is_cheaper_by_distance(call):
        return Served("by distance")
    reads = trace_bias_reads(call)
    why_not = why_not_elementwise(call, reads) or device.unsupported_bias(call.scheme, reads)
    if why_not is None:
        return Served("elementwise", reads)
    if has_bias_by_distance(call):
        return Served("by distance")
    at_keys: Array | None = bias_by_key(call)
    if at_keys is not None:
        key_bias = _key_bias_at_queries(call, at_keys), at_keys
        return Served("elementwise", trace_bias_reads(_of_key_bias(call, *key_bias)), key_bias)
    no_key_bias = "there is no key bias" if call.causal else "a key bias needs a causal mask"
    return Refusal("; ".join((why_not, _why_not_by_distance(call), no_key_bias)))


def _why_not_by_distance(call: Call) -> str:
    name = type(call.scheme).__name__
    if not call.scheme.relative:
        return f"{name} is not relative, so there is no table by distance"
    if not call.in_order:
        return "a table by distance needs the default positions"
    return f"{name} has features of tokens, so there is no table by distance"


def _has_bias(call: Call) -> bool:
    return has_bias(call.scheme) and jax.eval_shape(call.bias) is not None


def _of_key_bias(call: Call, at_queries: Array, at_keys: Array) -> Call:
    """The call with a key bias as features of another scheme.

    Softmax does not change when a number is subtracted from a whole row. Subtracting the key bias
    at the query's own position cancels large numbers before scores are added to them.
    """
    batch, heads = call.q.shape[:2]

    def with_feature(side: Tokens, w: Array) -> Tokens:
        return side.with_features({"w": jnp.broadcast_to(w, (batch, heads, w.shape[-1]))})

    query, key = with_feature(call.query, at_queries), with_feature(call.key, at_keys)
    return replace(call, scheme=_KeyBias(), arrays={}, query=query, key=key)


def _key_bias_at_queries(call: Call, at_keys: Array) -> Array:
    """The key bias at the queries' positions, ``(B or 1, H or 1, Q)``; 0 where it is unknown."""
    if call.aligned:
        return at_keys[..., call.k.shape[2] - call.q.shape[2] :]
    # Cumulative features exist on both sides; other features of keys may not exist for queries.
    queries_as_keys = Tokens(call.query.pos, features=call.query.features)
    try:
        bias: Array | None = bias_by_key(replace(call, key=queries_as_keys))
    except KeyError:
        bias = None
    return jnp.zeros((1, 1, call.q.shape[2])) if bias is None else bias
