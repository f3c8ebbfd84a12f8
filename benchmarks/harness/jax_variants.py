"""Variants that are measured in JAX: attention of this library, and its baselines."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import posenc_jax
from harness import variants
from harness.run import Arrays, Function, tokens_of
from harness.variants import DENSE, Inputs, Variant

Given = tuple[Function, Arrays]

_FUSED = ("pallas",)  # one fused kernel each, which can skip blocks


def ours(scheme: str, implementation: str, **options: Any) -> Variant:
    """Attention of posenc by name, with options of ``variants.ours``."""
    return variants.ours(scheme, implementation, compiles=True, **options)


def trials(lengths: tuple[int, ...] = ()) -> list[Variant]:
    """Variants that are only compared with each other: none."""
    return []


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
    found = [ours("none", implementation) for implementation in _FUSED]
    for implementation in _FUSED:
        found += [ours("alibi", implementation), ours("alibi", implementation, skip=False)]
        found += _others(implementation, ())
    for implementation in implementations:
        if implementation in DENSE:
            found.append(ours("alibi", implementation))
        else:
            found.append(ours("alibi", implementation, lengths=few))
            found += _others(implementation, few)
            found.append(ours("none", implementation, lengths=few))
    return found


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


def _jax(implementation: Any, inputs: Inputs) -> Given:
    _check_cudnn(implementation)
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    return lambda a: attend(*tokens_of(a)), {}


def _check_cudnn(implementation: str) -> None:
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise NotImplementedError("cuDNN needs a GPU")


def _biased(inputs: Inputs) -> Given:
    """The dense bias of all heads, in q's dtype, passed to every call.

    cuDNN takes no other. In bfloat16 the bias of far keys is off by up to 16, so this is only a
    yardstick of speed. With one bias for all examples the backward pass of jax.nn also computes its
    gradient.
    """
    _check_cudnn("cudnn")

    @jax.jit
    def held(slopes: Array) -> Array:
        at = jnp.arange(inputs.length)
        return (slopes[:, None, None] * (at - at[:, None])).astype(inputs.dtype)[None]

    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return lambda a: attend(*tokens_of(a), bias=a["bias"]), {"bias": held(inputs.slopes)}


def _tokamax(inputs: Inputs, biased: bool = False) -> Given:
    """ALiBi as a bias per key and head, which gives the same softmax as ALiBi."""
    try:
        import tokamax
    except ModuleNotFoundError as missing:
        raise NotImplementedError(f"{missing.name} is not installed") from missing
    at = jnp.arange(inputs.length)
    column = {"bias": (inputs.slopes[:, None] * at)[None, :, None, :]} if biased else {}

    def call(arrays: Arrays) -> Array:
        out: Array = tokamax.dot_product_attention(
            *tokens_of(arrays), bias=arrays.get("bias"), is_causal=True
        )
        return out

    return call, column
