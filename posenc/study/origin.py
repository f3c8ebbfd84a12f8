"""Where a study was made: the command, the sources of posenc, the processor."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import posenc
from posenc.study.study import Study


def command(study: Study) -> str:
    """The command that is this study: every option that is not at its default."""
    usual = {item.name: item.default for item in fields(Study)}
    usual["eval_lens"] = Study(train_len=study.train_len).eval_lens
    words = ["posenc", "compare"]
    for name, default in usual.items():
        if (value := getattr(study, name)) != default:
            words += _option(name, value)
    return shlex.join(words)


def _option(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{name.replace('_', '-')}", *map(_word, values)]


def _word(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def commit() -> str:
    """The commit that posenc runs from, and whether it was edited; empty if it is installed."""
    root = Path(posenc.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    if not (git := shutil.which("git")):
        return "unknown: git is not installed"
    asked = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"unknown: {done.stderr.strip()}"
    return done.stdout.strip().replace("-dirty", ", edited since")


def processor() -> str:
    """The processor's name, as the system tells it."""
    told = Path("/proc/cpuinfo")
    text = told.read_text(errors="replace") if told.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
