"""A key bias folded into the head dimension, so that cuDNN needs no ``Q x K`` bias.

``posenc.attn.folded`` says how. The bias is float32 here, and float64 in PyTorch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import dot_product_attention

from posenc.backend import (
    Call,
    Planned,
    Refusal,
    bias_by_key,
    fold_key_bias,
    folded_width,
    plan_unless,
    why_not_foldable,
)
from posenc_jax.fused.target import target

_WIDEST = {True: 256, False: 128}  # the largest head_dim of cuDNN: from Hopper on, and before


def folded(call: Call) -> tuple[Array, None]:
    """``(B, H, Q, Dv)`` by cuDNN without a bias."""
    q, k, v = call.q, call.k, call.v
    batch, heads, q_len, _ = q.shape
    if k.shape[1] != heads:  # each head's keys carry its own bias
        k, v = (jnp.repeat(a, heads // a.shape[1], axis=1) for a in (k, v))
    bias = bias_by_key(call)
    assert bias is not None
    bias = _without_gradient(jnp.broadcast_to(bias / call.scale, (batch, heads, bias.shape[-1])))
    q, k = fold_key_bias(q, k, bias, rounded=_rounded, xp=jnp)
    width = v.shape[3]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[3] - width)))
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    out = dot_product_attention(
        q, k, v, scale=call.scale, is_causal=q_len > 1, implementation="cudnn"
    )
    return jnp.swapaxes(out, 1, 2)[..., :width], None


def _rounded(values: Array, dtype: jnp.dtype) -> Array:
    """``values`` rounded to the digits of ``dtype``, in their own dtype.

    XLA keeps this operation. A conversion to ``dtype`` and back it leaves out on a GPU, and then
    nothing is left for the second number of a bias. Exponents stay those of float32: this
    operation would make zeros of the subnormal numbers of float16.
    """
    digits = jnp.finfo(dtype).nmant  # type: ignore[no-untyped-call]
    return jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=digits)


def plan(call: Call) -> Planned | Refusal:
    """How cuDNN serves a call, or why it cannot."""
    return plan_unless(_why_not(call), Planned(folded, "posenc does not ask cuDNN for one"))


def _why_not(call: Call) -> str | None:
    """Why a call has no bias that can be folded in, or cuDNN does not take it."""
    device = target()
    if device.platform != "gpu":
        return f"cuDNN needs a GPU, the device is a {device.platform}"
    dtypes = [a.dtype for a in (call.q, call.k, call.v)]
    if len(set(dtypes)) > 1 or dtypes[0] not in (jnp.bfloat16, jnp.float16):
        names = ", ".join(map(str, dtypes))
        return f"cuDNN takes q, k and v in one of bfloat16 and float16, got {names}"
    if (why := why_not_foldable(call)) is not None:
        return why
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    if not call.aligned or call.window is not None or call.query.seg is not None or not call.plain:
        return (
            "cuDNN without a bias takes default positions only, without a window, segments, a "
            "softcap, and the caller's own mask or bias"
        )
    if q_len not in (1, k_len):
        return f"cuDNN's causal mask needs as many queries as keys or one, got {q_len} and {k_len}"
    if call.scale <= 0:
        return f"cuDNN wants a scale above 0, got {call.scale}"
    dim, v_dim = call.q.shape[3], call.v.shape[3]
    widest = _WIDEST[float(device.capability or 0) >= 9.0]
    width = folded_width(max(dim, v_dim), dtypes[0], xp=jnp)
    if width > widest or v_dim > folded_width(dim, dtypes[0], xp=jnp):
        return f"cuDNN takes head_dim up to {widest}, the bias makes {width} of it"
    return None


def not_preferred(call: Call) -> str:
    """Why ``"auto"`` does not prefer it."""
    return "on an H200 it takes 2.5 times as long as 'pallas'"


@jax.custom_vjp
def _without_gradient(bias: Array) -> Array:
    """The same bias; its derivatives raise."""
    return bias


def _refuse_gradient(bias: Array) -> tuple[Array, None]:
    raise NotImplementedError(
        "implementation 'folded' cannot differentiate a bias that learns: its gradient would be "
        "rounded to half precision before it is summed, and sums that cancel lose all their digits"
    )


_without_gradient.defvjp(_refuse_gradient, lambda saved, gradient: (gradient,))
