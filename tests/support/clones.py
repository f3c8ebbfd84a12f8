"""Repositories in temporary folders, with the library and its benchmarks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def clone(folder):
    """A repository of one commit: the library and the benchmarks."""
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in ("posenc", "backends", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    (folder / ".gitignore").write_text("__pycache__/\n")  # Python writes these
    git(folder, "init", "--quiet", "--initial-branch", "any")
    commit(folder)
    (folder / "home").mkdir()
    return folder


def commit(folder):
    git(folder, "add", *("posenc", "backends", "benchmarks", ".gitignore"))
    git(folder, "commit", "--quiet", "--message", "any")


def git(folder, *words):
    who = {
        f"GIT_{role}_{what}": "a@b.c"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    return subprocess.run(
        ["git", *words],
        cwd=folder,
        env=os.environ | who,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
