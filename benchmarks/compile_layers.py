"""How long JAX traces and compiles a training step of 24 layers, in calls and in a pass.

    python benchmarks/compile_layers.py [--lengths 64 1024 2048] [--layers 24]

On a CPU, float32, ``B=1 H=8 D=64``, causal, ALiBi. Each figure is a compilation of its own, in
turns. Prints medians in seconds.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
from jax import Array

import posenc
import posenc_jax

_WAYS = {"calls": False, "a pass": True}


def seconds(scheme: posenc.ALiBi, length: int, layers: int, in_pass: bool) -> float:
    """The seconds that a step takes from its first trace to its program."""
    tokens = jax.ShapeDtypeStruct((1, length, scheme.num_heads, 64), jnp.float32)
    positions = posenc_jax.Positions.init(scheme, layers=layers, key=jax.random.key(0))

    def loss(q: Array, k: Array, v: Array) -> Array:
        if in_pass:
            calls = list(positions.bind(causal=True))
        else:
            calls = [partial(posenc_jax.attention, scheme=scheme, causal=True)] * layers
        for attend in calls:
            q = q + attend(q, k, v)
        return jnp.sum(q)

    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(jax.grad(loss, (0, 1, 2))).lower(tokens, tokens, tokens).compile()
    return time.perf_counter() - start


def main() -> None:
    """Compile in turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1024, 2048])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    scheme = posenc.ALiBi(num_heads=8)
    print(f"| tokens | {' | '.join(_WAYS)} |")
    for length in options.lengths:
        turns = [
            [seconds(scheme, length, options.layers, in_pass) for in_pass in _WAYS.values()]
            for _ in range(options.repeats)
        ]
        medians = " | ".join(f"{median(way):.1f}" for way in zip(*turns, strict=True))
        print(f"| {length} | {medians} |", flush=True)


if __name__ == "__main__":
    main()
