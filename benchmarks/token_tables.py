"""``chunked`` with terms that see the query or the key, against ``chunked`` without positions.

Run ``python benchmarks/token_tables.py``, or with ``--framework jax``. Causal attention,
``B=1 H=8 D=64``, float32, one thread. Processor time of the forward pass and of a training step
with gradients of all arrays, each the best of several interleaved runs, divided by that without
positions.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.clock import take_turns
from harness.run import KINDS, Ready, Runner, load, named, use_threads

import posenc
from posenc.apply.feature_needs import reads_hidden
from posenc.contract.protocol import PositionScheme
from posenc.schemes import DeBERTa, Inkling, Shaw, TransformerXL

HEADS, DIM = 8, 64
SCHEMES: dict[str, PositionScheme] = {
    "none": posenc.NoPE(),
    "shaw": Shaw(DIM),
    "transformer_xl": TransformerXL(HEADS, DIM, DIM),
    "deberta": DeBERTa(HEADS, DIM),
    "inkling": Inkling(HEADS, HEADS * DIM),
}


def ready(runner: Runner, scheme: PositionScheme, length: int, kind: str) -> Ready:
    """A forward pass or a training step of a scheme, called once."""
    shape = 1, HEADS, length, DIM
    arrays = {name: runner.tokens(seed, shape) for seed, name in enumerate("qkv")}
    if reads_hidden(scheme):
        arrays["x"] = runner.normal(3, (1, length, HEADS * DIM), "float32")

    attend = runner.attend(scheme, implementation="chunked")
    call = runner.ready(attend, {**arrays, **named(posenc.init_params(scheme))}, kind)
    call()
    return call


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=["torch", "jax"], default="torch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    use_threads(1)
    runner = load(options.framework).begin(threads=1)
    print(f"{'length':>6} {'stage':8}" + "".join(f"{name:>16}" for name in SCHEMES))
    for length in options.lengths:
        for kind in KINDS:
            calls = {name: ready(runner, own, length, kind) for name, own in SCHEMES.items()}
            taken = take_turns(calls, (options.rounds, options.rounds), now=time.process_time)
            best = {name: min(samples) for name, samples in taken.items()}
            ratios = (best[name] / best["none"] for name in SCHEMES)
            print(f"{length:6} {kind:8}" + "".join(f"{ratio:16.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
