"""The study's decoder in JAX: ``posenc.study.Decoder`` says what it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc.study import NORM_EPSILON, Recipe, embedding_scale
from posenc_jax.bound import Attend, Bound


def decoder_logits(recipe: Recipe, w: Any, tokens: Array, bound: Bound) -> Array:
    """Logits ``(N, T, V)`` of tokens ``(N, T)`` and a pass over the layers."""
    x = bound.embed(w["embed"][tokens] * embedding_scale(recipe))
    # Products are of the recipe's dtype; norms, logits and the sum of the layers' outputs float32.
    cast = {name: a if "norm" in name else a.astype(recipe.dtype) for name, a in w.items()}
    for layer, attend in enumerate(bound):
        x = _layer(x, cast, layer, recipe.heads, attend)
    head = cast["head"] if "head" in w else cast["embed"].T
    return _linear(_norm(x, w["norm"]).astype(head.dtype), head).astype(jnp.float32)


def _layer(x: Array, w: Any, layer: int, heads: int, attend: Attend) -> Array:
    dtype = w[f"{layer}.qkv"].dtype
    hidden = _norm(x, w[f"{layer}.norm1"]).astype(dtype)
    qkv = _linear(hidden, w[f"{layer}.qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    q, k, v = (qkv[:, :, n] for n in range(3))
    out = attend(q, k, v, x=hidden)
    x = x + _linear(out.reshape(x.shape), w[f"{layer}.out"])
    hidden = _norm(x, w[f"{layer}.norm2"]).astype(dtype)
    up = jax.nn.gelu(_linear(hidden, w[f"{layer}.up"]), approximate=True)
    return x + _linear(up, w[f"{layer}.down"])


@jax.custom_vjp
def _linear(x: Array, weight: Array) -> Array:
    """``x @ weight``, with gradients in the forms that XLA's CPU backend computes fast.

    Its own choice for the gradient of ``weight`` transposes both operands, and fuses the backward
    pass of the activation into one of them. A whole training step then takes 1.5 times as long.
    """
    return x @ weight


def _linear_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ weight, (x, weight)


def _linear_backward(residuals: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, weight = residuals
    barrier: Any = lax.optimization_barrier  # untyped in JAX
    d_out = barrier(d_out)
    rows, d_rows = x.reshape(-1, x.shape[-1]), d_out.reshape(-1, d_out.shape[-1])
    if weight.shape[0] <= weight.shape[1]:
        return d_out @ weight.T, _transposed_product(rows, d_rows)
    return d_out @ weight.T, barrier(_transposed_product(d_rows, rows)).T


def _transposed_product(a: Array, b: Array) -> Array:
    """``a.T @ b``."""
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())))


_linear.defvjp(_linear_forward, _linear_backward)


def _norm(x: Array, gain: Array) -> Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + NORM_EPSILON) * gain
