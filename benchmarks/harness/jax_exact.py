"""``exact`` in JAX: one program for each scheme, compiled beside others.

Programs are traced and run in one thread only, on JAX arrays: while threads differ in
``enable_x64``, converting a NumPy array sometimes gives the wrong width.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from harness import exact
from harness.run import params_of
from harness.variants import Inputs


def begin(
    inputs: Inputs, scheme: str, heads: Array, pool: ThreadPoolExecutor
) -> Callable[[], dict[str, Array]]:
    """What computes results and gradients, by a program that the pool compiles."""
    tokens = *inputs.tokens.values(), inputs.d_out
    given = heads, tokens, params_of(inputs.params(scheme))
    with jax.enable_x64(True):
        lowered = _exact.lower(inputs.schemes[scheme], *given)
    compiled = pool.submit(lowered.compile, {"xla_gpu_autotune_level": 0})

    def compute() -> dict[str, Array]:
        with jax.enable_x64(True):
            found: dict[str, Array] = compiled.result()(*given)
        return found

    return compute


@partial(jax.jit, static_argnums=0)
def _exact(
    scheme: Any, chosen: Array, tokens: tuple[Array, ...], params: dict[str, Array]
) -> dict[str, Array]:
    """Results and gradients by ``exact.attend``, as float32."""
    own_heads = partial(exact.some_heads, jnp, (0, 2, 1, 3), heads=chosen)
    q, k, v, d_out = (own_heads(a).astype(jnp.float64) for a in tokens)
    heads, length, _ = q.shape
    at = jnp.arange(length, dtype=jnp.int32)

    def by_distance(params: dict[str, Array]) -> Array:
        bias = exact.bias_by_distance(jnp, scheme, params, at, jnp.float64)
        return jnp.zeros((heads, length)) if bias is None else bias[chosen]

    own = {name: a.astype(jnp.float64) for name, a in params.items()}
    bias, pull = jax.vjp(by_distance, own)
    rows = exact.block_length(heads, length)

    def block(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        out, d_q, d_k, d_v, d_bias = sums
        first = number * rows
        here = [jax.lax.dynamic_slice_in_dim(a, first, rows, axis=1) for a in (q, d_out)]
        queries = jax.lax.dynamic_slice_in_dim(at, first, rows)
        own = exact.attend(jnp, here[0], k, v, here[1], bias, queries[:, None] - at)
        out, d_q = (
            jax.lax.dynamic_update_slice_in_dim(a, part, first, axis=1)
            for a, part in zip((out, d_q), own[:2], strict=True)
        )
        distance = queries[-1] - jnp.arange(own[4].shape[1], dtype=jnp.int32)
        d_bias = d_bias.at[:, jnp.maximum(distance, 0)].add(own[4])
        return out, d_q, d_k + own[2], d_v + own[3], d_bias

    zeros = jax.tree.map(jnp.zeros_like, (v, q, k, v, bias))
    out, d_q, d_k, d_v, d_bias = jax.lax.fori_loop(0, length // rows, block, zeros)
    d_params = {name: a[chosen] for name, a in pull(d_bias)[0].items()}
    wide = {"out": out, "out of step": out, "q": d_q, "k": d_k, "v": d_v, **d_params}
    return {name: a.astype(jnp.float32) for name, a in wide.items()}
