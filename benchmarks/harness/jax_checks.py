"""JAX for the checks: real kernels, TF32 only if asked for, in memory filled with NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp

import posenc
import posenc_jax
from harness.record import first_line
from posenc_jax.testing import Jax

FIRST = ("pallas",)  # the only implementation that runs kernels of this library
_NAN_BYTES = 2**28  # bytes


class Checked(Jax):
    """JAX on its default device, compiled as a user would, with blocks of the normal size.

    ``quickly``: with fewer optimisations, where compiling takes most of the time. Otherwise only
    the search for the fastest matrix products is left out.
    """

    def __init__(self, quickly: bool) -> None:
        self.default_compiler = "quick" if quickly else "untuned"
        self._precision = "highest"

    @contextmanager
    def precision_scope(self, dtypes: Sequence[str]) -> Iterator[None]:
        """Float32 products in full precision, unless in ``tf32``; memory that a kernel does not
        write holds NaN.
        """
        with jax.enable_x64("float64" in dtypes), jax.default_matmul_precision(self._precision):
            fill_with_nan()
            yield

    def check_device(self) -> None:
        """Raise if the device computes nothing any more, as after an illegal address."""
        jax.block_until_ready(jnp.zeros(8) + 1)

    @contextmanager
    def tf32(self) -> Iterator[None]:
        """Inside, float32 products have JAX's default precision."""
        self._precision = "default"
        try:
            yield
        finally:
            self._precision = "highest"


def compilations(device: str, *, quick: bool) -> int:
    """How many compilations each part may use."""
    return 12 if quick else 1000 if device == "cuda" else 100


def checked(device: str, *, compiles: bool) -> tuple[Checked, tuple[str, ...]]:
    """The framework of the checks, and its implementations that compile: all."""
    return Checked(quickly=device == "cpu"), posenc_jax.IMPLEMENTATIONS


def absent() -> dict[str, str]:
    """Implementations that refuse plain attention on this device, and why."""
    reasons = {}
    plain = [jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)] * 3
    for implementation in posenc_jax.IMPLEMENTATIONS:
        call = partial(
            posenc_jax.attention,
            scheme=posenc.ALiBi(4),
            causal=True,
            implementation=implementation,
        )
        try:
            jax.eval_shape(call, *plain)
        except NotImplementedError as refused:
            reasons[implementation] = first_line(refused)
    return reasons


def fill_with_nan() -> None:
    """Fill memory with NaN and free it, so that the next arrays probably get it."""
    if jax.default_backend() != "gpu":
        return
    held = [jnp.full(_NAN_BYTES // 4, jnp.nan, jnp.float32)]
    held += [jnp.full(2**17, jnp.nan, jnp.float32) for _ in range(16)]
    jax.block_until_ready(held)
