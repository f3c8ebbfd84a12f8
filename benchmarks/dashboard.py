"""Measure this commit with asv, publish, and make one page that opens from disk.

``python benchmarks/dashboard.py`` takes a few minutes on two cores. Results go to ``.asv/results``
in asv's format, one file per commit, so each run adds to the history. asv's own pages go to
``.asv/html``; they load scripts from the network and need a server (``asv preview``).
``.asv/html/dashboard.html`` shows the same results without either.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from dashboard_page import write_page  # noqa: E402

_MEASURED = ("posenc", "backends", "benchmarks")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a benchmark failed."""
    options = _options(arguments)
    measured = _git("rev-parse", "HEAD")
    if not options.page_only:
        _refuse_changes()
        _machine()
        _run(options, measured)
    _asv("publish", "--no-pull")
    page, failed = write_page(HERE / "asv.conf.json", measured)
    for name in failed:
        print(f"failed: {name}")
    print(f"open {page.as_uri()}")
    return bool(failed)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--bench", metavar="REGEX", help="only these; earlier results stay on the page"
    )
    parser.add_argument("--full", action="store_true", help="every length, not only the first")
    parser.add_argument(
        "--quick", action="store_true", help="one warm call each instead of a median"
    )
    parser.add_argument(
        "--page-only", action="store_true", help="only make the page, from existing results"
    )
    return parser.parse_args(arguments)


def _refuse_changes() -> None:
    """Exit if files changed: asv would store the results under a commit without the changes."""
    changed = _git("status", "--porcelain", "--", *_MEASURED)
    if changed:
        sys.exit(f"asv stores results by commit; commit these changes first:\n{changed}")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.rstrip()


def _machine() -> None:
    """Register this machine with asv, once, by ``asv machine --yes``."""
    if not (Path.home() / ".asv-machine.json").exists():
        _asv("machine", "--yes", stdout=subprocess.DEVNULL)  # --yes still prints its questions


def _run(options: argparse.Namespace, measured: str) -> None:
    words = ["run", "--python=same", "--set-commit-hash", measured, "--show-stderr"]
    if sys.platform != "linux":  # forking is missing, or unsafe with these libraries
        words += ["--launch-method", "spawn"]
    words += ["--quick"] * options.quick
    words += ["--bench", options.bench] if options.bench else []
    grid = {"POSENC_GRID": "full"} if options.full else {}
    if _asv(*words, allowed=(0, 2), grid=grid) == 2:
        print("some benchmarks failed; the page names them")


def _asv(
    *words: str,
    allowed: Sequence[int] = (0,),
    grid: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> int:
    """Run asv on this clone, even if another posenc is installed."""
    path = [str(ROOT), str(ROOT / "backends"), os.environ.get("ASV_PYTHONPATH", "")]
    own = {"ASV_PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-m", "asv", *words]
    if words[0] != "machine":
        command += ["--config", str(HERE / "asv.conf.json")]
    env = os.environ | own | (grid or {})
    code = subprocess.run(command, cwd=HERE, env=env, stdout=stdout).returncode
    if code not in allowed:
        sys.exit(f"asv {words[0]} ended with {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
