"""JAX as checks use it: kernels as they really run, without TF32, in memory that held NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from posenc_jax.testing import Jax

_POISON = 2**28  # bytes


class Checked(Jax):
    """JAX on its default device, compiled as a user would; blocks are as large as they are.

    ``quickly``: with fewer optimisations, where most of the time goes to the compiler.
    """

    def __init__(self, quickly: bool) -> None:
        self.default_compiler = "quick" if quickly else "jit"

    @contextmanager
    def precision_scope(self, dtypes: Sequence[str]) -> Iterator[None]:
        """Float32 is float32, and what a kernel does not write is NaN."""
        with jax.enable_x64("float64" in dtypes), jax.default_matmul_precision("highest"):
            poison()
            yield


def poison() -> None:
    """Leave NaN in the memory that the next arrays get, as far as an allocator is asked."""
    if jax.default_backend() != "gpu":
        return
    held = [jnp.full(_POISON // 4, jnp.nan, jnp.float32)]
    held += [jnp.full(2**17, jnp.nan, jnp.float32) for _ in range(16)]
    jax.block_until_ready(held)
