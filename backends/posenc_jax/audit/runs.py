"""Ways to ask a function of whole sequences for some positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array

from posenc.audit import adapters
from posenc.audit.adapters import row_of

HALF = ("float32", "bfloat16", "float16")
candidate = partial(adapters.candidate, framework="jax")
lacking = partial(adapters.lacking, framework="jax")


def in_a_prefill(rotate: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """``f(x, pos)`` of a function that rotates a whole sequence from position 0.

    Its tokens stand among others that are zero. One head after another, as some positions are far.
    """

    def f(x: Array, pos: Array) -> Array:
        row = row_of(pos)
        length = int(row[-1]) + 1
        if length == x.shape[2]:
            return rotate(x)
        heads = []
        for head in jnp.split(x, x.shape[1], axis=1):
            whole = jnp.zeros((*head.shape[:2], length, x.shape[-1]), x.dtype)
            heads.append(rotate(whole.at[:, :, row].set(head))[:, :, row])
        return jnp.concatenate(heads, axis=1)

    return f
