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

_FUSED = ("pallas",)  # one fused kernel each, which can skip blocks


class Inputs:
    """Normal q, k and v, ``(B, L, H, D)``, and a gradient of the result."""

    def __init__(self, heads: int, length: int, dim: int, dtype: str) -> None:
        keys = jax.random.split(jax.random.key(int(np.random.default_rng().integers(2**31))), 4)
        shape = 1, length, heads, dim
        *self.tokens, self.d_out = (_normal(key, shape, dtype) for key in keys)
        self.schemes = schemes(heads)

    def params(self, scheme: str) -> Params:
        """Learned arrays."""
        return {n: jnp.asarray(a) for n, a in first_params(scheme, self.schemes[scheme]).items()}


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    return jax.random.normal(key, shape, dtype)


def ours(
    scheme: str,
    implementation: str,
    *,
    learns: bool = False,
    skip: bool | None = None,
    lengths: tuple[int, ...] = (),
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
    return Variant(
        name, ready, role="ours", dense=dense, compiles=True, learns=learns, lengths=lengths
    )


def baselines() -> list[Variant]:
    """Attention of JAX without positions, and with a bias computed beforehand."""
    return [
        Variant("none jax cudnn", partial(_jax, "cudnn"), compiles=True),
        Variant(
            "alibi jax cudnn bias",
            _biased,
            dense=True,
            bytes_per_pair=8,
            compiles=True,
            exact=False,
        ),
        Variant("none jax xla", partial(_jax, "xla"), dense=True, compiles=True),
    ]


def of_this_library(few: tuple[int, ...] = ()) -> list[Variant]:
    """Every implementation but the reference, those with goals first.

    XLA compiles what is not one fused kernel for long, so that is measured at ``few`` lengths.
    """
    implementations = [
        implementation
        for implementation in posenc_jax.IMPLEMENTATIONS
        if implementation not in (*_FUSED, "reference")
    ]
    variants = [ours("none", implementation) for implementation in _FUSED]
    for implementation in _FUSED:
        variants += [ours("alibi", implementation), ours("alibi", implementation, skip=False)]
        variants += _others(implementation, ())
    for implementation in implementations:
        if implementation in DENSE:
            variants.append(ours("alibi", implementation))
        else:
            variants.append(ours("alibi", implementation, lengths=few))
            variants += _others(implementation, few)
            variants.append(ours("none", implementation, lengths=few))
    return variants


def _others(implementation: str, lengths: tuple[int, ...]) -> list[Variant]:
    """T5 and learned schemes."""
    return [
        ours("t5", implementation, lengths=lengths),
        ours("t5", implementation, learns=True, lengths=lengths),
        ours("slopes", implementation, learns=True, lengths=lengths),
    ]


def peers() -> list[Variant]:
    """Attention of other libraries; refused with a reason if they are not installed."""
    biased = partial(_tokamax, biased=True)
    return [
        Variant("none tokamax", _tokamax, role="peer", compiles=True),
        Variant("alibi tokamax column", biased, role="peer", compiles=True),
    ]


def _jax(implementation: Any, inputs: Inputs) -> tuple[Call, Held]:
    _check_cudnn(implementation)

    def call(q: Array, k: Array, v: Array, params: Params, held: Held) -> Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    return call, None


def _check_cudnn(implementation: str) -> None:
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise NotImplementedError("cuDNN needs a GPU")


def _biased(inputs: Inputs) -> tuple[Call, Held]:
    """The dense bias of all heads, in q's dtype, passed to every call.

    cuDNN takes no other. In bfloat16 the bias of far keys is off by up to 16, so this is only a
    yardstick of speed. With one bias for all examples the backward pass of jax.nn also computes its
    gradient.
    """
    _check_cudnn("cudnn")
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
