"""A loop over blocks of tokens whose step is compiled once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc_jax.trees import make_varying


@partial(jax.jit, static_argnums=0)
def scan_back(
    step: Callable[..., tuple[Any, Array]], start: Any, blocks: tuple[Array, ...],
    fixed: tuple[Array, ...],
) -> Array:  # fmt: skip
    """As ``posenc.contract.scan`` has it."""

    def own(carry: Any, block: tuple[Array, ...]) -> tuple[Any, Array]:
        return step(carry, block, fixed, xp=jnp)

    results: Array = lax.scan(own, make_varying(start, (blocks, fixed)), blocks, reverse=True)[1]
    return results
