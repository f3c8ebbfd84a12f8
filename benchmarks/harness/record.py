"""Metadata of a result, and how a result is written and printed."""

from __future__ import annotations

import datetime
import json
import platform
import re
import shutil
import subprocess
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_TRACE = 4000  # characters of a traceback
HERE = Path(__file__).resolve().parents[1]
_PACKAGES = (
    "posenc", "numpy", "array-api-compat", "torch", "triton", "jax", "jaxlib",
    "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "nvidia-cuda-nvcc",
    "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flash-attn", "flash-attn-4", "xformers", "tokamax",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Versions of everything a result may depend on; packages not installed are left out."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return installed | {"driver": _output(*driver), "commit": _commit()}


def processor() -> str:
    """Name of the processor, where the system has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def slug(name: str) -> str:
    """The name of a device as part of a file name."""
    return re.sub(r"\W+", "-", name).lower().strip("-")


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a JSON file with one line per row. A stopped run leaves the previous file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    fields = ",\n ".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in result.items())
    unfinished.write_text(f"{{\n {fields}\n}}\n", encoding="utf-8")
    unfinished.replace(path)


def fault(error: BaseException) -> dict[str, str]:
    """What a record says of an error."""
    trace = "".join(traceback.format_exception(error))
    return {"reason": f"{type(error).__name__}: {first_line(error)}", "traceback": trace[-_TRACE:]}


def first_line(error: BaseException) -> str:
    """The first line of an error, shortened."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def finite(number: float) -> float | None:
    """A number as JSON holds it: null for NaN and infinities."""
    return float(f"{number:.6g}") if abs(number) < float("inf") else None


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Text in columns; the first is left-aligned, None is a dash."""
    cells = [list(head), *[["-" if c is None else _shown(c) for c in row] for row in rows]]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value, allow_nan=False)
    return "[\n  " + ",\n  ".join(json.dumps(row, allow_nan=False) for row in value) + "\n ]"


def _shown(cell: Any) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) and abs(cell) < 1000 else _whole(cell)


def _whole(cell: Any) -> str:
    return f"{cell:.0f}" if isinstance(cell, float) else str(cell)


def _commit() -> str | None:
    """Commit of the sources, marked if files differ from it."""
    commit = _output("git", "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _output("git", "status", "--porcelain") else "")


def _output(*command: str) -> str | None:
    """The output of a command; None where there is no such command, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else None
