"""Correctness, then speed: ``python benchmarks/gpu_check.py``, under ten minutes on one GPU.

``--framework torch`` is the default; ``--framework jax`` does the same for JAX.

First every implementation is compared with the reference in float64, for every scheme and kind of
call: results and all gradients. Then forward, backward and memory are measured from 1 k to 128 k
tokens, against attention without positions, with interleaved runs. A JSON file holds all results,
and the reason for each check that did not run. A table is printed last. The exit code is 1 if
anything is wrong.

``--device cpu --quick`` runs the same code on small sizes as a dry run; its timings mean nothing.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import math
import platform
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import correctness, ratios, record  # noqa: E402
from harness.clock import Budget  # noqa: E402

_STAGES = ("forward", "backward", "step")
_ERRORS = ("relative", "largest")
_BAD = ("wrong", "failed")
_CORRECTNESS_SHARE = 0.45  # of the time, if both parts run


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if an implementation of this library is wrong."""
    options = _options(arguments)
    runner = importlib.import_module(f"harness.{options.framework}_runner").FrameworkRunner(
        options.device, quick=options.quick, compiles=options.compiles
    )
    seed = secrets.randbits(30) if options.seed is None else options.seed
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    result: dict[str, Any] = {
        "what": "posenc gpu_check",
        "date": record.now(),
        "arguments": asked | {"seed": seed},
        "device": {"machine": platform.machine()} | runner.device(),
        "versions": record.versions() | runner.versions(),
        "auto": runner.auto(),
        "absent": runner.absent(),
        "checks": [],
        "timings": [],
        "ratios": [],
    }
    out = options.out or HERE / "results" / f"{options.framework}-{runner.name}.json"
    _measure(result, runner, options, seed, out)
    print("\n" + _report(result))
    print(f"\n{out}")
    return int(result["counts"]["bad"] > 0)


def _measure(
    result: dict[str, Any], runner: Any, options: argparse.Namespace, seed: int, out: Path
) -> None:
    """Fill the result, and write it after each part, so that a stopped run leaves its parts."""
    begun, whole = time.monotonic(), Budget(60 * options.minutes)

    def save() -> None:
        result["ratios"] = ratios.ratios(result["timings"])
        result["counts"] = _counts(result)
        result["seconds"] = round(time.monotonic() - begun, 1)
        record.write(out, result)

    both = options.only is None
    if options.only != "speed":
        budget = Budget(whole.left() * (_CORRECTNESS_SHARE if both else 1.0), runner.compiles)
        result["checks"] = _run_checks(runner, runner.plan(), budget, seed)
        save()
    if options.only != "correctness":
        for row in runner.speed(Budget(whole.left() * (0.95 if both else 1.0), runner.compiles)):
            _print(_timing(row))
            result["timings"].append(row)
            if row["variant"] == result["timings"][0]["variant"]:
                save()
        save()
    missing = [n for n, row in enumerate(result["checks"]) if row["status"] == "not run"]
    if both and missing and not options.quick and whole.refuses() is None:
        # The remaining time goes to the checks that did not run.
        again = [runner.plan()[n] for n in missing]
        budget = Budget(whole.left(), runner.compiles)
        for n, row in zip(missing, _run_checks(runner, again, budget, seed + 10**6), strict=True):
            result["checks"][n] = row
    save()


def _run_checks(
    runner: Any, checks: Sequence[correctness.Check], budget: Budget, seed: int
) -> list[dict[str, Any]]:
    def on_result(row: dict[str, Any]) -> None:
        if row["status"] in _BAD or row["implementation"] in runner.compiled:
            _print(_check(row))

    run = correctness.run(
        checks, runner.framework, budget, seed,
        scale=runner.scale, compiled=runner.compiled, on_result=on_result,
    )  # fmt: skip
    return list(run)


def _counts(result: dict[str, Any]) -> dict[str, int]:
    """Number of checks per status; ``bad`` counts wrong and failed results of this library, and
    implementations without a right result.
    """
    implementations = {row["implementation"] for row in result["checks"]}
    unproven = implementations - {
        row["implementation"] for row in result["checks"] if row["status"] == "right"
    }
    counts = collections.Counter(row["status"] for row in result["checks"])
    wrong = sum(map(_wrong, result["timings"]))
    bad = sum(counts[status] for status in _BAD) + wrong + len(unproven)
    counts["implementations without a check"] = len(unproven)
    return {**dict(sorted(counts.items())), "wrong timings": wrong, "bad": bad}


def _wrong(row: dict[str, Any]) -> bool:
    """Whether a timed implementation of this library failed, or gave wrong results."""
    return row["ours"] and (row["status"] == "failed" or not row.get("right", True))


def _print(line: str) -> None:
    print(line, flush=True)


def _check(row: dict[str, Any]) -> str:
    what = " ".join(row[name] for name in ("implementation", "scheme", "layout", "dtype"))
    errors = {
        name: error
        for name, error in row.get("errors", {}).items()
        if name == "out" or any(error[m] is None or error[m] > error["allowed"] for m in _ERRORS)
    }
    beyond = [f"{name} {'/'.join(str(e[m]) for m in _ERRORS)}" for name, e in errors.items()]
    return f"{row['status']:8} {what}: {row['reason'] or ''} {', '.join(beyond)}".rstrip(" :")


def _timing(row: dict[str, Any]) -> str:
    times = [f"{stage} {row[stage]['median']:.3g} ms" for stage in _STAGES if stage in row]
    return f"{row['length']:>6} {row['variant']}: {', '.join(times) or row['reason']}"


def _report(result: dict[str, Any]) -> str:
    """Text: first what is wrong, then the times, then the goals."""
    parts = [
        f"absent   {name}: {reason}" for name, reason in result["absent"].items()
    ] + [
        _check(row) for row in result["checks"] if row["status"] in _BAD
    ] + [
        f"wrong    {row['variant']} at {row['length']}: {row['reason'] or row['errors']}"
        for row in result["timings"]
        if _wrong(row)
    ]  # fmt: skip
    lengths = sorted({row["length"] for row in result["timings"]})
    for stage in ("forward", "step"):
        rows = _by_variant(result["timings"], stage, lengths)
        if rows:
            parts.append("\n" + record.table([f"{stage}, ms", *map(str, lengths)], rows))
    if result["ratios"]:
        head = ["speed of ... relative to ...", "stage", "least", *map(str, lengths)]
        parts.append("\n" + record.table(head, _by_goal(result["ratios"], lengths)))
    counts = ", ".join(f"{name} {n}" for name, n in result["counts"].items())
    return "\n".join([*parts, "", f"{counts}; {result['seconds']} s"]).strip("\n")


def _by_variant(timings: list[dict[str, Any]], stage: str, lengths: list[int]) -> list[list[Any]]:
    names = dict.fromkeys(row["variant"] for row in timings if stage in row)
    medians = {(r["variant"], r["length"]): r[stage]["median"] for r in timings if stage in r}
    return [[name, *[medians.get((name, length)) for length in lengths]] for name in names]


def _by_goal(ratios: list[dict[str, Any]], lengths: list[int]) -> list[list[Any]]:
    values = {(r["goal"], r["stage"], r["length"]): r["ratio"] for r in ratios}
    least = {(r["goal"], r["stage"]): r["least"] for r in ratios}
    return [
        [*pair, least[pair], *[values.get((*pair, length)) for length in lengths]] for pair in least
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--framework", choices=["torch", "jax"], default="torch")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--quick", action="store_true", help="small sizes and few kinds of calls: a dry run")
    add("--minutes", type=_positive, default=9.0, help="nothing starts after these")
    add("--only", choices=["correctness", "speed"], help="run one part only")
    add("--compiles", type=int, help="at most, in each part; torch, 0: eager FlexAttention")
    add("--seed", type=int, help="of the inputs; new ones by default")
    add("--out", type=Path, help="the result; default: benchmarks/results/FRAMEWORK-DEVICE.json")
    return parser.parse_args(arguments)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
