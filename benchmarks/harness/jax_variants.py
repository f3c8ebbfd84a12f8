"""Variants that are measured in JAX: attention of this library, and its baselines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import posenc_jax
from harness.speed import DENSE, Variant, first_params, name_of, schemes

Held = Array | None
Params = dict[str, Array]
Call = Callable[[Array, Array, Array, Params, Held], Array]

_SKIPPING = ("pallas",)  # implementations that can skip blocks


class Inputs:
    """Normal q, k and v, ``(B, L, H, D)``, and a gradient of the result."""

    def __init__(self, batch: int, heads: int, length: int, dim: int, dtype: str) -> None:
        keys = jax.random.split(jax.random.key(int(np.random.default_rng().integers(2**31))), 4)
        shape = batch, length, heads, dim
        *self.tokens, self.d_out = (_normal(key, shape, dtype) for key in keys)
        self.schemes = schemes(heads)

    def params(self, scheme: str) -> Params:
        """Learned arrays."""
        return {n: jnp.asarray(a) for n, a in first_params(scheme, self.schemes[scheme]).items()}


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    return jax.random.normal(key, shape, dtype)


def ours(
    scheme: str, implementation: str, *, learns: bool = False, skip: bool | None = None
) -> Variant:
    """Attention of posenc by name; ``skip=False`` also computes negligible blocks."""
    options = {} if skip is None else {"skip_blocks": skip}

    def ready(inputs: Inputs) -> tuple[Call, Held]:
        kind = inputs.schemes[scheme]

        def call(q: Array, k: Array, v: Array, params: Params, held: Held) -> Array:
            return posenc_jax.attention(
                q, k, v, kind, params, True, implementation=implementation, **options
            )

        return call, None

    name, dense = name_of(scheme, implementation, learns, skip), implementation in DENSE
    return Variant(name, ready, ours=True, dense=dense, compiles=True, learns=learns)


def baselines() -> list[Variant]:
    """Attention of JAX without positions, and with a bias computed beforehand."""
    return [
        Variant("none jax cudnn", partial(_jax, "cudnn"), compiles=True),
        Variant("alibi jax cudnn bias", _biased, dense=True, bytes_per_pair=8, compiles=True),
        Variant("none jax xla", partial(_jax, "xla"), dense=True, compiles=True),
    ]


def of_this_library() -> list[Variant]:
    """Every implementation but the reference, those with goals first."""
    implementations = [
        implementation
        for implementation in posenc_jax.IMPLEMENTATIONS
        if implementation != "reference"
    ]
    linear = [implementation for implementation in implementations if implementation not in DENSE]
    variants = [ours("none", "pallas")]
    for implementation in linear:
        variants.append(ours("alibi", implementation))
        if implementation in _SKIPPING:
            variants.append(ours("alibi", implementation, skip=False))
    for implementation in linear:
        variants += [
            ours("t5", implementation),
            ours("t5", implementation, learns=True),
            ours("slopes", implementation, learns=True),
        ]
    variants += [
        ours("none", implementation) for implementation in linear if implementation != "pallas"
    ]
    return variants + [
        ours("alibi", implementation)
        for implementation in implementations
        if implementation in DENSE
    ]


def peers() -> list[Variant]:
    """Attention of other libraries; refused with a reason if they are not installed."""
    return [
        Variant("none tokamax", _tokamax, compiles=True),
        Variant("alibi tokamax column", partial(_tokamax, biased=True), compiles=True),
    ]


def _jax(implementation: Any, inputs: Inputs) -> tuple[Call, Held]:
    def call(q: Array, k: Array, v: Array, params: Params, held: Held) -> Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    return call, None


def _biased(inputs: Inputs) -> tuple[Call, Held]:
    """The dense bias of all heads, in q's dtype, passed to every call.

    With one bias for all examples the backward pass of jax.nn also computes its gradient.
    """
    length, dtype = inputs.tokens[0].shape[1], inputs.tokens[0].dtype

    @jax.jit
    def held(slopes: Array) -> Array:
        at = jnp.arange(length)
        return (slopes[:, None, None] * (at - at[:, None])).astype(dtype)[None]

    def call(q: Array, k: Array, v: Array, params: Params, held: Held) -> Array:
        return jax.nn.dot_product_attention(
            q, k, v, bias=held, is_causal=True, implementation="cudnn"
        )

    return call, held(_slopes(inputs))


def _tokamax(inputs: Inputs, biased: bool = False) -> tuple[Call, Held]:
    """ALiBi as a bias per key and head, which gives the same softmax as ALiBi."""
    try:
        import tokamax
    except ModuleNotFoundError as missing:
        raise NotImplementedError(f"{missing.name} is not installed") from missing
    at = jnp.arange(inputs.tokens[0].shape[1])
    column = (_slopes(inputs)[:, None] * at)[None, :, None, :] if biased else None

    def call(q: Array, k: Array, v: Array, params: Params, held: Held) -> Array:
        out: Array = tokamax.dot_product_attention(q, k, v, bias=held, is_causal=True)
        return out

    return call, column


def _slopes(inputs: Inputs) -> Array:
    alibi: Any = inputs.schemes["alibi"]
    return jnp.asarray(np.float32(alibi.head_slopes()))
