"""Count the instructions of a kernel's loop over tiles, in PTX or in the machine's code."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """One instruction.

    Attributes
    ----------
    name
        Its name.
    label
        Where it may jump to, or None.
    leaves
        Whether the next instruction never follows it.
    """

    name: str
    label: str | None
    leaves: bool


def count_loop(printed: str) -> dict[str, Any]:
    """Instructions, exponentials and products per score, in the loop over tiles.

    ``printed`` contains the PTX of a kernel. Empty if there is no such loop.
    """
    ptx = re.search(r"^\.version.*?^}", printed, re.M | re.S)
    machine_code = None if ptx is None else disassemble(ptx[0])
    loop = [] if ptx is None else find_loop(machine_code or ptx[0])
    weights = sum(op.startswith(("ex2", "MUFU.EX2")) for op in loop)
    scores = weights // 32 * 32  # the remainder is one or two per row
    if not scores:
        return {}
    sizes = [re.search(r"[m.]64[nx](\d+)[kx](\d+)", op) for op in loop if is_product(op)]
    flops = sum(2 * 64 * int(size[1]) * int(size[2]) for size in sizes if size is not None)
    return {
        "instructions": round(len(loop) / scores, 2),
        "exponentials": round(weights / scores, 3),
        "flops": flops // (scores * 128),  # the 128 threads of a warpgroup multiply together
        "counted in": "PTX" if machine_code is None else "SASS",
    }


def is_product(op: str) -> bool:
    """Whether an instruction multiplies matrices."""
    return op.startswith(("wgmma.mma_async", "HGMMA"))


def find_loop(text: str) -> list[str]:
    """The instructions of the loop over tiles.

    From each product, the shortest path back to it is one iteration in which no pair is masked. The
    longest of these paths is the loop.
    """
    ops, labels = _operations(text)
    successors: list[list[int]] = []
    for at, op in enumerate(ops):
        jump = [] if op.label is None else [labels[op.label]]
        successors.append(jump + [at + 1] * (not op.leaves and at + 1 < len(ops)))
    products = [at for at, op in enumerate(ops) if is_product(op.name)]
    paths = [_round_trip(successors, at) for at in products]
    return [ops[at].name for at in max(paths, key=len, default=[])]


def _round_trip(successors: Sequence[Sequence[int]], start: int) -> list[int]:
    """The shortest path from a node back to it; empty if there is none."""
    previous: dict[int, int] = {}
    frontier = [start]
    while frontier and start not in previous:
        reached = []
        for at in frontier:
            for after in successors[at]:
                if after not in previous:
                    previous[after] = at
                    reached.append(after)
        frontier = reached
    if start not in previous:
        return []
    path = [start]
    while (at := previous[path[-1]]) != start:
        path.append(at)
    return path


def _operations(text: str) -> tuple[list[Operation], dict[str, int]]:
    """All instructions, and the index of the instruction after each label.

    Moves between registers are left out: most of those in PTX only rename.
    """
    ops: list[Operation] = []
    labels: dict[str, int] = {}
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text)
    text = re.sub(r"\{[^{}]*\}", _rename_labels, text)
    for line in re.split(r"[;\n]", text):
        statement = line.strip(" \t{}")
        if label := re.match(r"([$.\w]+):", statement):
            labels[label[1]] = len(ops)
            continue
        parts = re.match(r"(@!?[%\w]+\s+)?([A-Za-z][\w.:]*)(.*)", statement)
        if parts is None or re.match(r"mov|MOV|NOP|WARPSYNC", parts[2]):
            continue
        target = None
        if re.match(r"bra\b|BRA\b", parts[2]):
            target = re.findall(r"[$.\w]+", parts[3])[-1]
        ends = parts[2] in ("ret", "EXIT") or target is not None
        ops.append(Operation(parts[2], target, ends and parts[1] is None))
    return ops, labels


def _rename_labels(match: re.Match[str]) -> str:
    """A scope in braces, with labels that differ from those of other scopes."""
    scope = match[0]
    for label in re.findall(r"^\s*(\w+):\s", scope, re.M):
        scope = re.sub(rf"\b{label}\b", f"{label}.{match.start()}", scope)
    return scope


def disassemble(ptx: str) -> str | None:
    """The machine code of PTX, as text; None without NVIDIA's tools."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    for tools in (Path(root, "cu13", "bin") for root in roots):
        if not (tools / "ptxas").exists() or not (tools / "nvdisasm").exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(ptx)
            command = [tools / "ptxas", "-arch=sm_90a", source, "-o", binary]
            subprocess.run(command, check=True, capture_output=True)
            command = [tools / "nvdisasm", "-c", binary]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return None
