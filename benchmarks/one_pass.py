"""What a layer costs beside SDPA: in a call alone, and in a pass that an earlier layer began.

    python benchmarks/one_pass.py [--threads 2]

Eager PyTorch on a CPU, float32, ``B=1 H=8 D=64``, causal. SDPA, the call and the layer of a pass
take turns, so that a slower minute is a slower minute for all three. Prints medians in µs, those of
posenc above SDPA's own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.clock import Speed, take_turns
from harness.run import FORWARD, Arrays, Runner, load, tokens_of

import posenc

HEADS, DIM, LAYERS = 8, 64, 3
SCHEMES = {
    "no positions": posenc.NoPE(),
    "ALiBi": posenc.ALiBi(HEADS),
    "T5": posenc.T5Bias(HEADS, causal=True),
    "RoPE": posenc.RoPE(DIM),
}
SAMPLE, TURNS, WARM = 0.02, 15, 100  # seconds; number; calls before


def measure(runner: Runner, scheme: posenc.PositionScheme, queries: int, keys: int) -> list[float]:
    """Median µs of SDPA, a call alone and a later layer of a pass.

    In decoding the cache holds rotated keys.
    """
    lengths = {"q": queries, "k": keys, "v": keys}
    arrays = {
        name: runner.tokens(seed, (1, HEADS, length, DIM))
        for seed, (name, length) in enumerate(lengths.items())
    }
    positions, decodes = runner.backend.Positions(scheme, LAYERS), queries < keys
    tokens = posenc.Tokens(runner.xp().arange(keys)) if decodes else None
    bound = positions.bind(tokens, causal=True)
    given: dict[str, Any] = {"k_transformed": decodes}
    alone = {"causal": True, "tokens": tokens, **given}

    def sdpa(a: Arrays) -> Any:
        return runner.without_positions(*tokens_of(a), causal=not decodes)

    def call(a: Arrays) -> Any:
        return positions[1].attend(*tokens_of(a), **alone)

    def layer(a: Arrays, number: int = 2) -> Any:
        return bound[number](*tokens_of(a), **given)

    ready = {f.__name__: runner.ready(f, arrays, FORWARD) for f in (sdpa, call, layer)}
    expected = ready["call"]()
    for number in range(LAYERS):
        (own,), _ = runner.ready(lambda a, n=number: layer(a, n), arrays, FORWARD).answers()
        if not bool((own == expected).all()):
            raise SystemExit(f"{scheme}: a pass differs from a call")
    for _ in range(WARM):
        for one in ready.values():
            one()
    taken = take_turns(ready, (TURNS, TURNS), shortest=SAMPLE)
    return [1e3 * Speed.of(samples).median for samples in taken.values()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    runner = load("torch").begin(parser.parse_args().threads)
    print("| | SDPA, µs | call alone, above it | in a pass, above it |\n| :-- | --: | --: | --: |")
    for what, sizes in {"64 tokens": (64, 64), "decoding, 2048 keys": (1, 2048)}.items():
        for name, scheme in SCHEMES.items():
            own, alone, together = measure(runner, scheme, *sizes)
            row = f"{own:.0f} | {alone - own:.0f} | {together - own:.0f}"
            print(f"| {what}, {name} | {row} |")


if __name__ == "__main__":
    main()
