"""A key bias folded into the head dimension, so that cuDNN serves it without a ``Q x K`` bias.

Where a bias is ``u(q) + w(k)``, a few more channels make it part of the product of queries and
keys: ``[1, u, q] . [w, 1, k] = w + u + q.k``, with ``w`` and ``u`` in three numbers of half
precision each. ``u = -w`` of a query's own key comes first, so that the large numbers cancel before
anything is added to them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import (
    Call,
    bias_by_key,
    has_bias,
)
from posenc_jax.fused.target import target

_LIMBS = 3  # of 8 or 11 bits hold the 24 of float32; two of bfloat16 are off by 1e-2
_MULTIPLE = 8  # of channels, which cuDNN asks for
_WIDEST = {True: 256, False: 128}  # head_dim that cuDNN takes: from Hopper on, and before
_UNITS = {jnp.dtype("float16"): 2.0**8}  # what float16 can hold ends at 65504
# By name, so that what is folded can be tried without cuDNN.
_attend = partial(jax.nn.dot_product_attention, implementation="cudnn")


def folded(call: Call) -> tuple[Array, None]:
    """``(B, H, Q, Dv)`` by cuDNN without a bias."""
    q, k, v = call.q, call.k, call.v
    batch, heads, q_len, dim = q.shape
    if k.shape[1] != heads:  # each head's keys carry its own bias
        k, v = (jnp.repeat(a, heads // a.shape[1], axis=1) for a in (k, v))
    keys = bias_by_key(call)
    assert keys is not None
    keys = _fixed(jnp.broadcast_to(keys / call.scale, (batch, heads, keys.shape[-1])))
    queries = -keys[..., keys.shape[-1] - q_len :]
    unit = _UNITS.get(q.dtype, 1.0)
    channels: list[tuple[Array, Array]] = []
    for of_key, of_query in zip(
        _limbs(keys / unit, q.dtype), _limbs(queries / unit, q.dtype), strict=True
    ):
        channels += [(jnp.full_like(of_query, unit), of_key)]
        channels += [(of_query, jnp.full_like(of_key, unit))]
    extra = (jnp.stack(side, axis=-1) for side in zip(*channels, strict=True))
    width, wide = v.shape[3], _wide(dim)
    q, k = (
        _widened(jnp.concatenate([own, a], axis=-1), wide)
        for own, a in zip(extra, (q, k), strict=True)
    )
    tokens = (jnp.swapaxes(a, 1, 2) for a in (q, k, _widened(v, wide)))
    out = _attend(*tokens, scale=call.scale, is_causal=q_len > 1)
    return jnp.swapaxes(out, 1, 2)[..., :width], None


def refuses(call: Call) -> str | None:
    """Why a call has no bias that could be folded in, or cuDNN does not take it."""
    name, here = type(call.scheme).__name__, target()
    if here.platform != "gpu":
        return f"cuDNN needs a GPU, the device is a {here.platform}"
    if not call.q.dtype == call.k.dtype == call.v.dtype or call.q.dtype not in (
        jnp.bfloat16, jnp.float16,
    ):  # fmt: skip
        kinds = ", ".join(str(a.dtype) for a in (call.q, call.k, call.v))
        return f"cuDNN takes q, k and v in one of bfloat16 and float16, got {kinds}"
    if not has_bias(call.scheme):
        return f"{name} has no bias to fold in"
    if call.query.places is not None:
        return "places are given, and a key bias holds for positions"
    if not call.causal:
        return "only under a causal mask a bias splits into one of queries and one of keys"
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    if not call.aligned or call.window is not None or call.query.seg is not None or not call.plain:
        return (
            "cuDNN without a bias knows aligned positions, no window, no segments, and no mask, "
            "bias or cap of the caller's"
        )
    if q_len not in (1, k_len):
        return f"cuDNN's causal mask needs as many queries as keys or one, got {q_len} and {k_len}"
    if call.scale <= 0:
        return f"cuDNN wants a scale above 0, got {call.scale}"
    if bias_by_key(call) is None:
        return f"{name} declares no key_bias"
    widest = _WIDEST[float(here.capability or 0) >= 9.0]
    width = max(call.q.shape[3], call.v.shape[3])
    if _wide(width) > widest or call.v.shape[3] > _wide(call.q.shape[3]):
        return f"cuDNN takes head_dim up to {widest}, the bias makes {_wide(width)} of it"
    return None


def without_lse(call: Call) -> str:
    """Why there is no log-sum-exp."""
    return "jax.nn.dot_product_attention by cuDNN is asked for none here"


def avoided(call: Call) -> str:
    """Why ``"auto"`` passes by."""
    return "nobody measured it on a GPU yet"


@jax.custom_vjp
def _fixed(keys: Array) -> Array:
    """The bias of keys, which has no gradient here.

    Raises
    ------
    NotImplementedError
        It is differentiated.
    """
    return keys


def _refuse(keys: Array) -> tuple[Array, None]:
    raise NotImplementedError(
        "implementation 'folded' cannot differentiate a bias that learns: its gradient would be "
        "rounded to "
        "half precision before it is summed, and sums that cancel lose all their digits"
    )


_fixed.defvjp(_refuse, lambda saved, gradient: (gradient,))


def _wide(dim: int) -> int:
    """The head dimension with the bias in it."""
    return -(-(dim + 2 * _LIMBS) // _MULTIPLE) * _MULTIPLE


def _widened(array: Array, width: int) -> Array:
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, width - array.shape[3])))


def _limbs(values: Array, dtype: jnp.dtype) -> list[Array]:
    """Numbers of a dtype whose sum is ``values``, the largest first."""
    found: list[Array] = []
    for _ in range(_LIMBS):
        found.append(values.astype(dtype))
        values = values - found[-1].astype(values.dtype)
    return found
