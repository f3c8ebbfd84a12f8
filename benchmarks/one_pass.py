"""What a layer costs beside SDPA: in a call alone, and in a pass that an earlier layer began.

    python benchmarks/one_pass.py [--threads 2]

Eager PyTorch on a CPU, float32, ``B=1 H=8 D=64``, causal. SDPA, the call and the layer of a pass
take turns, so that a slower minute is a slower minute for all three. Prints medians in µs, those of
posenc above SDPA's own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import posenc
import posenc_torch

HEADS, DIM, LAYERS = 8, 64, 3
SCHEMES = {
    "no positions": posenc.NoPE(),
    "ALiBi": posenc.ALiBi(HEADS),
    "T5": posenc.T5Bias(HEADS, causal=True),
    "RoPE": posenc.RoPE(DIM),
}
CALLS, TURNS = 100, 15


def medians(functions: Sequence[Callable[[], Any]]) -> list[float]:
    """Microseconds of each function, in turns."""
    for function in functions:
        for _ in range(CALLS):
            function()
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(TURNS):
        for function, own in zip(functions, taken, strict=True):
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            own.append((time.perf_counter() - start) / CALLS * 1e6)
    return [statistics.median(own) for own in taken]


def measure(scheme: posenc.PositionScheme, queries: int, keys: int) -> list[float]:
    """SDPA, a call alone and a later layer of a pass; in decoding the cache holds rotated keys."""
    q = torch.randn(1, HEADS, queries, DIM)
    k, v = torch.randn(2, 1, HEADS, keys, DIM).unbind()
    positions, decodes = posenc_torch.Positions(scheme, LAYERS), queries < keys
    tokens = posenc.Tokens(torch.arange(keys)) if decodes else None
    bound = positions.bind(tokens, causal=True)
    given: dict[str, Any] = {"k_transformed": decodes}
    expected = positions[1].attend(q, k, v, causal=True, tokens=tokens, **given)
    for attend in bound:
        if not torch.equal(attend(q, k, v, **given), expected):
            raise SystemExit(f"{scheme}: a pass differs from a call")
    return medians(
        [
            lambda: scaled_dot_product_attention(q, k, v, is_causal=not decodes),
            lambda: positions[1].attend(q, k, v, causal=True, tokens=tokens, **given),
            lambda: bound[2](q, k, v, **given),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    print("| | SDPA, µs | call alone, above it | in a pass, above it |\n| :-- | --: | --: | --: |")
    with torch.no_grad():
        for what, sizes in {"64 tokens": (64, 64), "decoding, 2048 keys": (1, 2048)}.items():
            for name, scheme in SCHEMES.items():
                own, alone, together = measure(scheme, *sizes)
                row = f"{own:.0f} | {alone - own:.0f} | {together - own:.0f}"
                print(f"| {what}, {name} | {row} |")


if __name__ == "__main__":
    main()
