"""The functions that a bias may call inside a kernel, a subset of ``jax.numpy``.

Mosaic GPU has no ``log1p``, ``expm1`` or ``pow``, and its ``tanh`` is accurate to 11 bits only.
Here ``exp`` and ``log`` compute them, accurate to a few units of ``2**-23`` of the largest
intermediate. Sines are missing on purpose: the fast ones are wrong at large arguments.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.numpy import (  # noqa: F401
    abs,
    add,
    astype,
    bool,
    clip,
    divide,
    equal,
    exp,
    float32,
    full_like,
    greater,
    greater_equal,
    inf,
    int32,
    less,
    less_equal,
    log,
    log2,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    ones_like,
    sign,
    sqrt,
    square,
    subtract,
    where,
    zeros_like,
)


def log1p(x: Array) -> Array:
    """``log(1 + x)``."""
    return jnp.log(1 + x)


def expm1(x: Array) -> Array:
    """``exp(x) - 1``."""
    return jnp.exp(x) - 1


def tanh(x: Array) -> Array:
    """From ``exp(-2 |x|)``, which does not overflow."""
    decayed = jnp.exp(-2 * jnp.abs(x))
    return jnp.sign(x) * (1 - decayed) / (1 + decayed)


def pow(x: Array, y: Any) -> Array:
    """``x**y`` for ``x >= 0``; 0 at 0."""
    positive = x > 0
    power = jnp.exp(y * jnp.log(jnp.where(positive, x, 1)))
    return jnp.where(positive, power, 0)
