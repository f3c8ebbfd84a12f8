"""The origin of a study: its command, the commit of posenc, the processor."""

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
from posenc.study.recipe import Recipe
from posenc.study.scales import SCALES
from posenc.study.study import Study


def command(study: Study) -> str:
    """The command that repeats this study: every option that differs from its default."""
    defaults = {item.name: item.default for item in fields(Study)}
    if len(study.recipes) == 1:  # else the study has what was given, and each task its own
        defaults |= _of_task(study)
    words = ["posenc", "compare"]
    for name, default in defaults.items():
        if (value := getattr(study, name)) != default:
            words += _option(name, value)
    return shlex.join(words)


def _of_task(study: Study) -> dict[str, Any]:
    """The settings of the only task, and of them the lengths that follow from ``train_len``."""
    same: dict[str, Any] = {"task": study.task}
    if study.scale:
        same |= {"scale": study.scale, "tokens": study.tokens, "text": study.text}
    plain = Study(**same)
    names = [item.name for item in fields(Recipe) if item.name != "task"]
    names += SCALES.get(study.scale, ())
    lengths = Study(**same, train_len=study.train_len).eval_lens
    return {name: getattr(plain, name) for name in names} | {"eval_lens": lengths}


def _option(name: str, value: Any) -> list[str]:
    if value is False:  # what a scale switched on
        return [f"--no-{name.replace('_', '-')}"]
    values = value if isinstance(value, tuple) else () if value is True else (value,)
    return [f"--{name.replace('_', '-')}", *map(_word, values)]


def _word(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def commit() -> str:
    """The commit of a checkout, and whether files were edited; empty for an installed package."""
    root = Path(posenc.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    if not (git := shutil.which("git")):
        return "unknown: git is not installed"
    words = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"unknown: {done.stderr.strip()}"
    return done.stdout.strip().replace("-dirty", ", edited since")


def processor() -> str:
    """The processor's name as the system reports it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
