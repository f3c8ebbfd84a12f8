"""Every implementation against the framework's own attention, on a CPU.

Run ``python benchmarks/cpu_ratio.py``. Causal attention, ``B=1 H=8 D=64``, forward and training
step, interleaved runs, medians. A ratio is the time of an implementation divided by the time of
attention without positions: 1 is as fast, 2 takes twice as long. The baseline in PyTorch is
``scaled_dot_product_attention(is_causal=True)``. In JAX (``--framework jax``) it is
``jax.nn.dot_product_attention(is_causal=True)``, which holds all scores.

In PyTorch each timed call follows one of the same kind that is not timed, as in a loop of training
steps. After another variant caches are cold, and at 64 tokens the baseline takes twice as long.

Keep other work off the cores. PyTorch's threads spin while they wait for each other. If one of them
has to share its core, a call of many operations waits at each, and its ratio doubles or more.
``OMP_WAIT_POLICY=PASSIVE`` makes them sleep, so that ratios hold on a busy machine; on a quiet one
it may cost a call in parts up to a quarter.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import record  # noqa: E402
from harness.clock import NO_END, Budget  # noqa: E402
from harness.run import load, use_threads  # noqa: E402
from harness.speed import Settings, Timing  # noqa: E402

_STAGES = ("forward", "step")
_BASE = {"torch": "none torch sdpa", "jax": "none jax xla"}  # no positions


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = _options(arguments)
    if options.flush:  # threads that start later inherit it
        importlib.import_module("torch").set_flush_denormal(True)
    use_threads(options.threads)
    variants = importlib.import_module(f"harness.{options.framework}_variants")
    runner = load(options.framework, "cpu").begin(options.threads)
    settings = Settings(
        options.dtype, heads=8, dim=64, lengths=tuple(options.lengths),
        rounds=(options.rounds, options.rounds), slowest=1e3 * options.slowest,
    )  # fmt: skip
    name = _BASE[options.framework]
    ours = [v for v in variants.of_this_library() if v.scheme in ("alibi", "t5", "slopes")]
    ours = [v for v in ours if any(word in v.name for word in options.only)]
    if options.framework == "jax":  # on a GPU this one skips nothing, so no list has both
        ours.append(variants.ours("alibi", "chunked", skip=False))
    base = [v for v in variants.baselines() if v.name == name]
    timings = []
    for row in Timing(runner, settings, [*base, *ours], Budget(NO_END)).rows():
        times = [f"{s} {row[s]['median']:.4g} ms" for s in _STAGES if s in row]
        print(
            f"{row['length']:>6} {row['variant']}: {', '.join(times) or row['reason']}", flush=True
        )
        timings.append(row)
    ratios = against(timings, name)
    result = {
        "what": "posenc cpu_ratio",
        "date": record.now(),
        "arguments": {name: value for name, value in vars(options).items() if name != "out"},
        "device": {"machine": platform.machine(), "processor": record.processor()},
        # With PASSIVE, threads sleep between operations, and waking them takes longer.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        "versions": record.versions(),
        "timings": timings,
        "ratios": ratios,
    }
    out = options.out or HERE / "results" / f"{options.framework}-cpu.json"
    record.write(out, result)
    print("\n" + _table(ratios, options.lengths) + f"\n\n{out}")
    return 0


def against(timings: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Time of every variant divided by that of the one with this name, at the same length."""
    base = {
        (row["length"], stage): row[stage]["median"]
        for row in timings
        for stage in _STAGES
        if row["variant"] == name and stage in row
    }
    return [
        {
            "variant": row["variant"],
            "length": row["length"],
            "stage": stage,
            "ratio": float(f"{row[stage]['median'] / base[row['length'], stage]:.4g}"),
        }
        for row in timings
        for stage in _STAGES
        if stage in row and (row["length"], stage) in base and row["variant"] != name
    ]


def _table(ratios: Sequence[dict[str, Any]], lengths: Sequence[int]) -> str:
    values = {(r["variant"], r["stage"], r["length"]): r["ratio"] for r in ratios}
    rows = [
        [variant, stage, *[values.get((variant, stage, length)) for length in lengths]]
        for stage in _STAGES
        for variant in dict.fromkeys(r["variant"] for r in ratios if r["stage"] == stage)
    ]
    return record.table(["time relative to none", "", *map(str, lengths)], rows)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--framework", choices=sorted(_BASE), default="torch")
    add("--lengths", type=int, nargs="+", default=[64, 1024, 4096, 16384])
    add("--only", nargs="+", default=[""], help="words; only variants with one in their name")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=5, help="samples of each")
    add(
        "--slowest",
        type=float,
        default=60.0,
        help="seconds: variants that would take longer are not run",
    )
    add(
        "--flush", action="store_true",
        help="PyTorch takes subnormal numbers for 0: where that changes a figure, they cost time",
    )  # fmt: skip
    add("--out", type=Path, help="the result; default: benchmarks/results/FRAMEWORK-cpu.json")
    options = parser.parse_args(arguments)
    if options.flush and options.framework != "torch":
        parser.error("--flush is for --framework torch: XLA takes subnormal numbers for 0 anyway")
    return options


if __name__ == "__main__":
    sys.exit(main())
