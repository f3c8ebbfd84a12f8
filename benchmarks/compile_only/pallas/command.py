"""Compile the fused JAX kernels of posenc on a machine without a GPU or a TPU.

``python benchmarks/compile_only/pallas`` compiles every kernel for an H200 and for TPU v5e and v6e,
with every form of bias and every head dimension. It prints registers, spills and shared memory as
ptxas reports them, and instructions per score in the compiled loop. It also prints how temporaries
of a training step grow with its length. Then it predicts times on an H200: see ``roofline.py``.

The exit code is 1 if anything does not compile, spills, waits for each product, or grows faster
than linearly. It needs no driver: ``pip install "jax[cuda13]"`` on Python 3.12 for the H200,
``jax[tpu]`` for TPUs. With ``nvidia-cuda-nvdisasm`` it counts instructions of the machine,
otherwise those of PTX, of which the assembler merges some more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import record

from compile_only.pallas.compile import (
    BATCH,
    DEVICES,
    ENVIRONMENT,
    FORMS,
    HEADS,
    LENGTHS,
    Case,
    compile_case,
    missing_packages,
)
from compile_only.pallas.roofline import FORMS as PREDICTED_FORMS
from compile_only.pallas.roofline import SHAPE, block_size, predict

BENCHMARKS = Path(__file__).resolve().parents[2]
GROWTH = 1.1  # more than this is faster than linear; padding and ranges of blocks are less


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a kernel does not compile, spills, or a step holds more than it should."""
    options = _parse(arguments)
    if options.case:
        options.out.write_text(json.dumps(compile_case(Case(**json.loads(options.case)))))
        return 0
    result: dict[str, Any] = {
        "what": "posenc compile_only/pallas",
        "date": record.now(),
        "versions": record.versions(),
        "sizes": {"batch": BATCH, "heads": HEADS, "length": LENGTHS[0], "dtype": "bfloat16"},
        "kernels": [],
        "steps": [],
        "predicted": [],
        "absent": {n: why for n in options.devices if (why := missing_packages(n)) is not None},
    }
    out = options.out or BENCHMARKS / "results" / "pallas-without-device.json"
    wrong, counted = [], {}
    for device, dim, form in itertools.product(options.devices, options.dims, options.forms):
        if device in result["absent"]:
            continue
        compiled = compile_in_process(Case(device, form, dim))
        if device == "h200" and dim == SHAPE[2]:
            counted[form] = compiled["kernels"]
        what, faults = {"device": device, "form": form, "dim": dim}, find_faults(compiled)
        result["kernels"] += [what | {"kernel": n} | row for n, row in compiled["kernels"].items()]
        step = {name: compiled[name] for name in ("temporaries", "transposes")}
        result["steps"].append(what | step | {"wrong": faults})
        for fault in faults:
            wrong.append(f"{device} {form} {dim}: {fault}")
            print(f"wrong    {wrong[-1]}", flush=True)
        record.write(out, result)  # an interrupted run leaves what it has
    for form in PREDICTED_FORMS:
        if options.predict and all("flops" in k for k in counted.get(form, {"": {}}).values()):
            result["predicted"] += predict(form, counted[form], block_size())
    print(_report(result))
    for name, packages in result["absent"].items():
        print(f"\nnothing was compiled for {DEVICES[name]}: it needs {packages}")
    record.write(out, result)
    print(f"\n{len(wrong)} wrong; {out}")
    return int(bool(wrong or result["absent"]))


def compile_in_process(case: Case) -> dict[str, Any]:
    """``compile_case`` in a process of its own, which a compiler that aborts takes with it."""
    with tempfile.TemporaryDirectory() as folder:
        out, command = Path(folder, "result.json"), Path(__file__).parent
        arguments = ["--case", json.dumps(asdict(case)), "--out", str(out)]
        done = subprocess.run(
            [sys.executable, str(command), *arguments],
            env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if out.exists():
            result: dict[str, Any] = json.loads(out.read_text())
            return result
    last = (done.stderr.strip() or "no reason").splitlines()[-1][:300]
    errors = {"process": f"{done.returncode}: {last}"}
    return {"kernels": {}, "temporaries": {}, "transposes": {}, "errors": errors}


def find_faults(compiled: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled case."""
    wrong = [f"{name}: {error}" for name, error in compiled["errors"].items()]
    wrong += [
        f"{name} spills {row['spills']} bytes"
        for name, row in compiled["kernels"].items()
        if row.get("spills")
    ]
    wrong += [
        f"{name} waits for each product"
        for name, row in compiled["kernels"].items()
        if row.get("serialized")
    ]
    wrong += [
        f"a step of {length} has {count} transposes"
        for length, count in compiled["transposes"].items()
        if count
    ]
    ratio = growth(compiled["temporaries"])
    if ratio is not None and ratio > GROWTH:
        wrong.append(f"temporaries grow {ratio:.2f} times as fast as the length")
    return wrong


def growth(temporaries: dict[str, int]) -> float | None:
    """How much faster than the length temporaries grow: 1 is linear."""
    if len(temporaries) < 2:
        return None
    (short, few), (long, many) = ((int(n), size) for n, size in temporaries.items())
    return many * short / (max(few, 1) * long)


def _report(result: dict[str, Any]) -> str:
    columns = "registers", "spills", "shared", "instructions", "exponentials", "flops"
    head = ["device", "dim", "form", "kernel", *columns]
    rows = [
        [row["device"], row["dim"], row["form"], row["kernel"], *[row.get(c) for c in columns]]
        for row in result["kernels"]
    ]
    parts = [record.table(head, rows)]
    lengths = [f"temporaries at {n}" for n in LENGTHS]
    rows = [
        [row["device"], row["dim"], row["form"], *row["temporaries"].values(),
         growth(row["temporaries"])]
        for row in result["steps"] if len(row["temporaries"]) == len(LENGTHS)
    ]  # fmt: skip
    parts.append(record.table(["device", "dim", "form", *lengths, "growth"], rows))
    if result["predicted"]:
        head = list(result["predicted"][0])
        rows = [[row.get(name) for name in head] for row in result["predicted"]]
        batch, heads, dim = SHAPE
        where = f"an H200, bfloat16, causal, B={batch} H={heads} D={dim}"
        parts.append(f"predicted, nothing was run: {where}\n" + record.table(head, rows))
    return "\n\n".join(parts)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--devices", nargs="+", default=list(DEVICES), choices=list(DEVICES))
    add("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    add("--dims", nargs="+", type=int, default=[64, 128], help="head dimensions")
    add("--no-predict", dest="predict", action="store_false", help="compile only")
    add("--out", type=Path, help="default: benchmarks/results/pallas-without-device.json")
    add("--case", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)
