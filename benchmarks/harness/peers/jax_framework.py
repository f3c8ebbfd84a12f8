"""Sides in JAX: both compiled by ``jax.jit``, with their leaves as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax  # noqa: F401  # computes angles once, once it is imported
from harness.peers.measure import Framework, Shape
from harness.peers.side import Side
from posenc.testing import Host


class Jax(Framework):
    """JAX on a CPU."""

    name = "jax"

    def array(self, value: Host, learns: bool) -> Any:
        return jnp.asarray(value)

    def host(self, array: Any) -> Host:
        return np.asarray(array)

    def forward(self, side: Side, mode: str) -> Callable[[], Sequence[Any]]:
        leaves = [leaf.array for leaf in side.leaves.values()]
        program = jax.jit(lambda *own: _several(side.call(*own)))
        return lambda: jax.block_until_ready(program(*leaves))

    def step(
        self, side: Side, mode: str, d_out: Callable[[Sequence[Shape]], Sequence[Any]]
    ) -> Callable[[], Sequence[Any]]:
        leaves = [leaf.array for leaf in side.leaves.values()]
        gradients: list[Any] = []

        @jax.jit
        def program(own: Sequence[Any], d_outs: Sequence[Any]) -> Sequence[Any]:
            out, pull = jax.vjp(lambda *leaves: _several(side.call(*leaves)), *own)
            return *out, *pull(tuple(d_outs))

        def run() -> Sequence[Any]:
            if not gradients:
                shapes = jax.eval_shape(lambda *own: _several(side.call(*own)), *leaves)
                gradients.extend(d_out([a.shape for a in shapes]))
            return jax.block_until_ready(program(leaves, gradients))

        return run

    def reset(self) -> None:
        jax.clear_caches()


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
