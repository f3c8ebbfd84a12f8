"""Correctness, then speed: ``python benchmarks/gpu_check.py``, under ten minutes on one GPU.

``--framework torch`` is the default; ``--framework jax`` does the same for JAX.

First every implementation is compared with the reference in float64, for every scheme and kind of
call: results and all gradients. Then forward, backward and memory are measured from 1 k to 128 k
tokens, with interleaved runs, and results and gradients of some heads are compared with float64
there too. Goals are told with the result: met, missed, or not measured and why.

The exit code is 1 if an implementation is wrong or fails, or a baseline of the goals does, or if
the run ends early. One JSON file holds all of it. It is written as results come, so a run that is
stopped leaves a valid file.
For more of each part give both a run of their own, ``--only correctness`` and ``--only speed``.

``--device cpu --quick`` runs the same code on small sizes as a dry run; its timings mean nothing.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import correctness, ratios, record  # noqa: E402
from harness.clock import Budget  # noqa: E402
from harness.device import Device  # noqa: E402

_STAGES = ("forward", "backward", "step")
_ERRORS = ("relative", "largest")
_BAD = ("wrong", "failed")
_WORST_FIRST = ("missed", "not measured", "met", "measured")  # statuses of goals
_FUSED = ("flex", "pallas")
_CORRECTNESS_SHARE = 0.45  # of the time, if both parts run
_WRITING_SHARE = 0.05  # of the time
_HOST_BOUND = 1.25  # times the time of the device
_JUDGED = ("ours", "baseline")  # variants that must not fail


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if an implementation of this library, or a baseline, is wrong or fails."""
    options = _options(arguments)
    seed = secrets.randbits(30) if options.seed is None else options.seed
    device = Device(
        options.framework, options.device, quick=options.quick, compiles=options.compiles, seed=seed
    )
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    result: dict[str, Any] = {
        "what": "posenc gpu_check",
        "date": record.now(),
        "seconds": 0.0,
        "ended by": {"reason": "a stop from outside, or it is not done"},
        "report": [],
        "arguments": asked | {"seed": seed},
        "device": {"machine": platform.machine()} | device.describe(),
        "versions": record.versions() | device.runner.versions(),
        "auto": device.auto(),
        "absent": device.absent(),
        "counts": {},
        "ratios": [],
        "timings": [],
        "checks": [],
    }
    folder = Path(os.environ.get("OUT") or HERE / "results")
    out = options.out or folder / f"{options.framework}-{device.name}.json"
    writer = Writer(result, out, device, options)
    try:
        _measure(result, device, options, seed, writer.write)
        result["ended by"] = None
    except BaseException as error:  # such as a device that computes nothing any more
        result["ended by"] = record.fault(error)
        print("\n" + result["ended by"]["traceback"])
    writer.write(now=True)
    # The goals come last here, because what shows output may show only its end.
    print("\n".join(["", *_tables(result), "", *_summary(result), "", str(out)]))
    return int(result["counts"]["bad"] > 0 or result["ended by"] is not None)


class Writer:
    """Completes the result with its summary and writes it, in at most a twentieth of the time."""

    def __init__(
        self, result: dict[str, Any], out: Path, device: Device, options: argparse.Namespace
    ) -> None:
        self._result, self._out = result, out
        self._goals = () if options.only == "correctness" else device.goals
        self._lengths = device.settings.lengths
        self._begun, self._next = time.monotonic(), 0.0

    def write(self, *, now: bool = False) -> None:
        """Write, if it is time or must be now."""
        begun, result = time.monotonic(), self._result
        if begun < self._next and not now:
            return
        _keep_first_traces([*result["checks"], *result["timings"]])
        result["ratios"] = ratios.ratios(result["timings"], self._goals, self._lengths)
        result["counts"] = _counts(result)
        result["seconds"] = round(begun - self._begun, 1)
        result["report"] = [*_summary(result), "", *_tables(result)]
        record.write(self._out, result)
        self._next = time.monotonic() + (time.monotonic() - begun) / _WRITING_SHARE


def _keep_first_traces(rows: Sequence[dict[str, Any]]) -> None:
    """One traceback for each reason."""
    seen = set()
    for row in rows:
        if "traceback" in row and row["reason"] in seen:
            del row["traceback"]
        seen.add(row["reason"])


def _measure(
    result: dict[str, Any],
    device: Device,
    options: argparse.Namespace,
    seed: int,
    write: Callable[[], None],
) -> None:
    """Fill the result; ``write()`` as its parts come."""
    whole, both = Budget(60 * options.minutes), options.only is None
    write()
    if options.only != "speed":
        budget = Budget(whole.left() * (_CORRECTNESS_SHARE if both else 1.0), device.compiles)
        for row in _run_checks(device, device.plan(), budget, seed):
            result["checks"].append(row)
            write()
    if options.only != "correctness":
        finished: list[dict[str, Any]] = []

        def on_part(rows: list[dict[str, Any]]) -> None:
            result["timings"] = finished + rows
            write()

        speed = device.speed(Budget(whole.left() * (0.95 if both else 1.0), device.compiles))
        for row in speed.rows(on_part):
            _print(_timing(row))
            finished.append(row)
        result["timings"] = finished
    missing = [n for n, row in enumerate(result["checks"]) if row["status"] == "not run"]
    if both and missing and not options.quick and whole.refuses() is None:
        # The remaining time goes to the checks that did not run.
        again = [device.plan()[n] for n in missing]
        budget = Budget(whole.left(), device.compiles)
        for n, row in zip(missing, _run_checks(device, again, budget, seed), strict=True):
            result["checks"][n] = row
            write()


def _run_checks(
    device: Device, checks: Sequence[correctness.Check], budget: Budget, seed: int
) -> Iterator[dict[str, Any]]:
    rows = correctness.run(
        checks, device.framework, budget, seed, scale=device.scale, compiled=device.compiled
    )
    for row in rows:
        compiled = row["implementation"] in device.compiled and row["status"] != "not run"
        if row["status"] in _BAD or compiled:
            _print(_check(row))
        yield row


def _counts(result: dict[str, Any]) -> dict[str, int]:
    """Number of checks and of goals per status. ``bad`` counts wrong and failed results of this
    library and of baselines, and implementations without a right result.
    """
    implementations = {row["implementation"] for row in result["checks"]}
    unproven = implementations - {
        row["implementation"] for row in result["checks"] if row["status"] == "right"
    }
    counts = collections.Counter(row["status"] for row in result["checks"])
    wrong = sum(map(_wrong, result["timings"]))
    bad = sum(counts[status] for status in _BAD) + wrong + len(unproven)
    counts["implementations without a check"] = len(unproven)
    goals = collections.Counter(
        f"goals {row['status']}" for row in result["ratios"] if row["least"] is not None
    )
    return {**goals, **dict(sorted(counts.items())), "wrong timings": wrong, "bad": bad}


def _wrong(row: dict[str, Any]) -> bool:
    """Whether a timed implementation of this library, or a baseline, failed or is wrong."""
    return row["role"] in _JUDGED and (row["status"] == "failed" or not row.get("right", True))


def _print(line: str) -> None:
    print(line, flush=True)


def _check(row: dict[str, Any]) -> str:
    what = " ".join(row[name] for name in ("implementation", "scheme", "layout", "dtype"))
    what += " tf32" if row["tf32"] else ""
    errors = {
        name: error
        for name, error in row.get("errors", {}).items()
        if name == "out" or any(error[m] is None or error[m] > error["allowed"] for m in _ERRORS)
    }
    beyond = [f"{name} {'/'.join(str(e[m]) for m in _ERRORS)}" for name, e in errors.items()]
    return f"{row['status']:8} {what}: {row['reason'] or ''} {', '.join(beyond)}".rstrip(" :")


def _timing(row: dict[str, Any]) -> str:
    times = [f"{stage} {row[stage]['median']:.3g} ms" for stage in _STAGES if stage in row]
    wrong = ["WRONG"] if not row.get("right", True) else []
    return f"{row['length']:>6} {row['variant']}: {', '.join(wrong + times) or row['reason']}"


def _summary(result: dict[str, Any]) -> list[str]:
    """Lines: counts, what is wrong, the goals, and what a reader of them must know."""
    counts = ", ".join(f"{name} {n}" for name, n in result["counts"].items())
    wrong = [_check(row) for row in result["checks"] if row["status"] in _BAD] + [
        f"wrong    {row['variant']} at {row['length']}: {row['reason'] or row['errors']}"
        for row in result["timings"]
        if _wrong(row)
    ]
    goals = [row for row in result["ratios"] if row["least"] is not None]
    device = ", ".join(f"{name} {value}" for name, value in result["device"].items())
    ended = [f"ended by {result['ended by']['reason']}"] if result["ended by"] else []
    parts = [
        f"{counts}; {result['seconds']} s",
        device,
        *ended,
        *wrong,
        *_ratios("goal: speed of ... relative to ..., ! missed", goals),
        *_missing(goals),
        *_choices(result["auto"]),
        *[f"absent   {name}: {reason}" for name, reason in result["absent"].items()],
        *_remarks(result["timings"]),
    ]
    return "\n".join(parts).splitlines()


def _tables(result: dict[str, Any]) -> list[str]:
    """Lines: all times, and ratios without a goal."""
    timings, parts = result["timings"], []
    lengths = sorted({row["length"] for row in timings})
    for stage in ("forward", "step"):
        rows = _by_variant(timings, stage, lengths)
        if rows:
            parts += [record.table([f"{stage}, ms", *map(str, lengths)], rows), ""]
    rows = _by_variant(timings, "TFLOP/s of forward", lengths)
    if rows:
        parts += [record.table(["forward, TFLOP/s", *map(str, lengths)], rows), ""]
    others = [row for row in result["ratios"] if row["least"] is None]
    parts += [*_ratios("speed of ... relative to ...", others), *_missing(others)]
    return "\n".join(parts).splitlines()


def _ratios(title: str, ratios: list[dict[str, Any]]) -> list[str]:
    """A table with a row per goal and stage, the worst first."""
    by_goal = collections.defaultdict(list)
    for row in ratios:
        by_goal[row["goal"], row["stage"]].append(row)
    lengths = sorted({row["length"] for row in ratios})
    rows = []
    for (goal, stage), some in by_goal.items():
        status = next(s for s in _WORST_FIRST if s in {row["status"] for row in some})
        values = {row["length"]: _marked(row) for row in some if "ratio" in row}
        own = [values.get(n) for n in lengths]
        rows.append((f"{goal}, {stage}", status, some[0]["least"], *own))
    rows.sort(key=lambda row: _WORST_FIRST.index(row[1]))
    head = [title, "", "least", *map(str, lengths)]
    return ["", record.table(head, rows), ""] if rows else []


def _marked(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3g}" + ("!" if row["status"] == "missed" else "")


def _missing(ratios: list[dict[str, Any]]) -> list[str]:
    """Why some goals were not measured."""
    reasons = collections.defaultdict(list)
    for row in ratios:
        if row["status"] == "not measured":
            reasons[row["reason"]].append(f"{row['goal']}, {row['stage']} at {row['length']}")
    lines = [
        f"  {reason} ({goals[0]}{f' and {len(goals) - 1} more' if goals[1:] else ''})"
        for reason, goals in reasons.items()
    ]
    return ["not measured:", *lines, ""] if lines else []


def _choices(auto: dict[str, Any]) -> list[str]:
    """The implementation that schemes get by default, and why not a fused kernel."""
    schemes = collections.defaultdict(list)
    for name, chosen in auto.items():
        skipped = [f"not {n}: {why}" for n, why in chosen["others"].items() if n in _FUSED]
        schemes["; ".join([chosen["implementation"], *skipped])].append(name)
    return [f"auto     {', '.join(names)}: {text}" for text, names in schemes.items()]


def _remarks(timings: list[dict[str, Any]]) -> list[str]:
    """What a reader of the times must know."""
    stages = [(row, s) for row in timings for s in ("forward", "step") if s in row]
    remarks = {
        "make the host wait, so their times count for no goal": [
            (row, stage) for row, stage in stages if ratios.waits(row, stage)
        ],
        f"take {_HOST_BOUND} times as long, called one after another, as on the device alone": [
            (row, stage)
            for row, stage in stages
            if (row.get(f"wall of {stage}") or 0) > _HOST_BOUND * row[stage]["median"]
        ],
        "have other digits when called again, as after a race": [
            (row, stage)
            for row, stage in stages
            if row["role"] == "ours" and not row[f"{stage} repeats"]
        ],
        "are only yardsticks of speed, with a bias rounded to q's dtype": [
            (row, stage) for row, stage in stages if not row["exact"]
        ],
    }
    lines = []
    for remark, some in remarks.items():
        at = collections.defaultdict(list)
        for row, stage in some:
            at[f"{row['variant']} ({stage})"].append(str(row["length"]))
        names = [f"{name} {' '.join(lengths)}" for name, lengths in at.items()]
        lines += [f"these {remark}: {', '.join(names)}"] if names else []
    return lines


def _by_variant(timings: list[dict[str, Any]], name: str, lengths: list[int]) -> list[list[Any]]:
    """A stage's medians, or other numbers, by variant and length."""
    variants = dict.fromkeys(row["variant"] for row in timings if name in row)
    values = {(r["variant"], r["length"]): r[name] for r in timings if name in r}
    shown = {at: v["median"] if isinstance(v, dict) else v for at, v in values.items()}
    return [[v, *[shown.get((v, length)) for length in lengths]] for v in variants]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--framework", choices=["torch", "jax"], default="torch")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--quick", action="store_true", help="small sizes and few kinds of calls: a dry run")
    add("--minutes", type=_positive, default=8.0, help="nothing starts after these")
    add("--only", choices=["correctness", "speed"], help="run one part only")
    add("--compiles", type=int, help="at most, in each part; torch, 0: eager FlexAttention")
    add("--seed", type=int, help="of the inputs; new ones by default")
    add("--out", type=Path, help="the result; default: FRAMEWORK-DEVICE.json in $OUT, if set, "
        "or in benchmarks/results")  # fmt: skip
    return parser.parse_args(arguments)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt("terminated")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that a run that is stopped tells what it has
    sys.exit(main())
