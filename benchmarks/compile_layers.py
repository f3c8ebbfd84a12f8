"""How long JAX traces and compiles a training step of 24 layers, in calls and in a pass.

    python benchmarks/compile_layers.py [--lengths 64 1024 2048] [--layers 24]

On a CPU, float32, ``B=1 H=8 D=64``, causal, ALiBi. Each figure is a compilation of its own, in
turns. Prints medians in seconds.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.clock import NO_END, Budget, Sample, Speed, interleave
from harness.run import STEP, Arrays, Runner, load, tokens_of

import posenc

HEADS, DIM = 8, 64
WAYS = {"calls": False, "a pass": True}


def compilation(runner: Runner, length: int, layers: int, in_pass: bool) -> Sample:
    """The seconds that a step takes from its first trace to its program."""
    scheme = posenc.ALiBi(HEADS)
    positions = runner.backend.Positions.init(scheme, layers=layers, key=runner.key(0))

    def loss(arrays: Arrays) -> Any:
        q, k, v = tokens_of(arrays)
        if in_pass:
            calls = list(positions.bind(causal=True))
        else:
            calls = [partial(runner.attention, scheme=scheme, causal=True)] * layers
        for attend in calls:
            q = q + attend(q, k, v)
        return q.sum()

    shape = 1, HEADS, length, DIM
    tokens = {name: runner.tokens(seed, shape) for seed, name in enumerate("qkv")}
    runner.reset()
    ready = runner.ready(loss, tokens, STEP)
    ready.compile()
    return {"seconds": sum(ready.seconds.values())}


def main() -> None:
    """Compile in turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1024, 2048])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runner = load("jax")
    print(f"| tokens | {' | '.join(WAYS)} |")
    for length in options.lengths:
        runs = {
            name: partial(compilation, runner, length, options.layers, in_pass)
            for name, in_pass in WAYS.items()
        }
        taken = interleave(runs, options.repeats, Budget(NO_END))
        speeds = [Speed.of([s["seconds"] for s in samples]) for samples in taken.values()]
        print(f"| {length} | {' | '.join(f'{one.median:.1f}' for one in speeds)} |", flush=True)


if __name__ == "__main__":
    main()
