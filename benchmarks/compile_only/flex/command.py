"""FlexAttention's GPU kernels for posenc, on a machine that has no GPU.

``python benchmarks/compile_only/flex`` prints a row per scheme, dtype, head dimension and pass. A
row says whether Triton and ptxas compile what torch generates for an H200, with which registers,
spills and shared memory. The same kernels then run in Triton's interpreter on a CPU, and the last
column is their error against the reference. What is compiled is
``posenc_torch.attention(implementation="flex")`` on tensors that claim to be on a GPU and have no
values. What is run is ``score_mod`` and ``block_mask``.

It needs a C++ compiler, Linux, torch for CPUs, and the triton that torch for CUDA asks for:
``pip install torch==2.13.0 triton==3.7.1``. It patches internals of both, hence the versions. It
does not measure speed, nor what only hardware has: the order of atomics, the rounding of tensor
cores, races.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from harness.record import fault

from compile_only.flex.cases import LENGTH, SCHEMES, Case
from compile_only.flex.fake_cuda import SHARED, load_hooks, version_mismatch

COLUMNS = "registers", "spills", "shared", "warps", "stages"
# Errors of interpreted kernels, relative to the largest reference value: of the result and of the
# gradients of q, k and v, and of those of all other arrays. A gradient that sums whole rows, such
# as that of a slope, keeps the rounding of every weight: 4e-2 in bfloat16 has been seen.
BOUNDS = {"float32": (1e-5, 2e-5), "float16": (4e-3, 1e-2), "bfloat16": (3e-2, 8e-2)}
Errors: TypeAlias = Mapping[str, Mapping[str, float]]  # by pass and array


def _kernel_options(text: str) -> tuple[tuple[str, Any], ...]:
    """FlexAttention's kernel options, from ``name=value,name=value``."""
    pairs = (pair.split("=") for pair in text.split(","))
    return tuple((name, json.loads(value)) for name, value in pairs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--schemes", nargs="+", default=[*SCHEMES], choices=[*SCHEMES])
    add("--dtypes", nargs="+", default=["bfloat16"], choices=[*BOUNDS])
    add("--dims", nargs="+", type=int, default=[64, 128], help="head dimensions")
    add("--length", type=int, default=LENGTH, help="length of the compiled calls")
    add("--dynamic", action="store_true", help="compile for any length")
    add("--options", type=_kernel_options, default=(), help="kernel options: fwd_BLOCK_N=64,...")
    add("--decoding", action="store_true", help="also compile a decoding step")
    add("--graph", action="store_true", help="compile calls inside a program of the user")
    add("--packed", action="store_true", help="two documents in each row")
    add("--keep", type=Path, help="a folder for sources, TTGIR, PTX and cubins")
    add("--no-run", action="store_true", help="compile only")
    add("--interpret", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Print the table; 1 if a kernel does not compile, fit or run, or if its error is too large."""
    arguments = _arguments()
    if (reason := version_mismatch()) is not None:
        print(reason, file=sys.stderr)
        return 1
    load_hooks()
    if arguments.interpret:
        print(json.dumps(_interpret(Case(**json.loads(arguments.interpret)))))
        return 0
    print(f"{'scheme':14}{'dtype':9}{'dim':>4} {'pass':11}", end="")
    print("".join(f"{name:>10}" for name in COLUMNS), f"{'error':>9}")
    failures = 0
    for scheme, dtype, dim in itertools.product(
        arguments.schemes, arguments.dtypes, arguments.dims
    ):
        case = Case(
            scheme, dtype, dim, arguments.length, arguments.dynamic,
            packed=arguments.packed, graph=arguments.graph, kernel_options=arguments.options,
        )  # fmt: skip
        reports = _compile_passes(case, arguments.keep)
        if arguments.decoding:
            reports |= _compile_passes(replace(case, decoding=True), arguments.keep)
        errors = None if arguments.no_run else _errors_in_interpreter(case)
        for name, report in reports.items():
            failure = _failure(name, report, errors, *BOUNDS[dtype])
            failures += failure is not None
            _print_row(case, name, report, errors, failure)
    return int(failures > 0)


def _print_row(
    case: Case,
    name: str,
    report: dict[str, Any] | str,
    errors: Errors | None,
    failure: str | None,
) -> None:
    print(f"{case.scheme:14}{case.dtype:9}{case.dim:4} {name:11}", end="")
    if not isinstance(report, str):
        print("".join(f"{report[column]:10}" for column in COLUMNS), end="")
    if errors is not None and name in errors:
        print(f"{_largest(errors[name].values()):10.1e}", end="")
    print("" if failure is None else f"  {failure}", flush=True)


def _failure(
    name: str,
    report: dict[str, Any] | str,
    errors: Errors | None,
    bound: float,
    bound_learned: float,
) -> str | None:
    """What is wrong with a pass; None if nothing is."""
    if isinstance(report, str):
        return f"does not compile: {report}"
    if report["shared"] > SHARED:
        return "does not fit"
    if report["requested"] > SHARED:
        return f"not pipelined: that takes {report['requested']} bytes"
    name = name.removesuffix(" 2")
    if errors is None or name == "decoding":
        return None
    if name not in errors:
        return "does not run"
    bounds = dict.fromkeys(("forward", "q", "k", "v"), bound)
    wrong = [a for a, error in errors[name].items() if not error <= bounds.get(a, bound_learned)]
    return f"wrong: {', '.join(wrong)}" if wrong else None


def _compile_passes(case: Case, keep: Path | None) -> dict[str, dict[str, Any] | str]:
    """The report of each pass; an error message if it has none."""
    from compile_only.flex.inductor import compile_kernel, kernel_sources  # after load_hooks

    passes = ["decoding"] if case.decoding else ["forward", "backward"]
    try:
        sources = kernel_sources(case)
    except Exception as error:
        return dict.fromkeys(passes, fault(error)["reason"])
    folder = None
    if keep is not None:
        folder = keep / "-".join(map(str, (case.scheme, case.dtype, case.dim, *passes[:1])))
        folder.mkdir(parents=True, exist_ok=True)
        for n, (name, source) in enumerate(sources):
            (folder / f"{n}-{name}.py").write_text(source)
    reports: dict[str, dict[str, Any] | str] = {}
    for name, source in sources:
        if "_tem_" not in name:  # a small kernel around FlexAttention's: it must compile
            report = _try(compile_kernel, name, source, folder)
            if isinstance(report, str):
                reports[name] = report
            continue
        of_pass = passes["backward" in name]
        # Near and far keys may have a kernel each; only that for near ones reads a bias.
        if of_pass in reports:
            of_pass += " 2"
        reports[of_pass] = _try(compile_kernel, name, source, folder)
    return reports


def _try(compile_kernel: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | str:
    try:
        return compile_kernel(*arguments)
    except Exception as error:
        return fault(error)["reason"]


def _interpret(case: Case) -> dict[str, float]:
    """The largest errors of a case, by array, over all lengths."""
    from compile_only.flex.interpreter import LENGTHS, errors  # after load_hooks

    by_length = [errors(case, length) for length in LENGTHS]
    return {name: _largest(each[name] for each in by_length) for name in by_length[0]}


def _largest(errors: Iterable[float]) -> float:
    """The largest error; NaN if there is one, which ``max`` may lose."""
    return float(np.max(list(errors)))


def _errors_in_interpreter(case: Case) -> Errors:
    """Errors of both passes, from a new process: Triton chooses its interpreter at import."""
    command = [sys.executable, str(Path(__file__).parent), "--interpret", json.dumps(asdict(case))]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return {}
    errors = json.loads(done.stdout.splitlines()[-1])
    return {"forward": {"forward": errors.pop("forward")}, "backward": errors}
