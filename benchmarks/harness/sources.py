"""The sources of commits: git, and the measured code of a commit in a folder of its own."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("posenc", "backends")


def git(*words: str) -> str:
    """What git prints; ``CalledProcessError`` if it fails."""
    return _git(*words).decode().rstrip()


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The measured code of a commit, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        files = io.BytesIO(_git("archive", commit, "--", *CODE))
        with tarfile.open(fileobj=files) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)
