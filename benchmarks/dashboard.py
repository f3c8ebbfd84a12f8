"""Measure commits with asv, publish, and make one page that opens from disk.

``python benchmarks/dashboard.py`` takes a few minutes on two cores. Results go to ``.asv/results``
in asv's format, one file per commit, so each run adds to the history. asv's own pages go to
``.asv/html/index.html``. ``.asv/html/dashboard.html`` shows the last commit, and its ratios.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from asv.config import Config

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import history  # noqa: E402
from dashboard_page import write_page  # noqa: E402
from harness.sources import ROOT, checkout, git  # noqa: E402

_MEASURED = ("posenc", "backends", "benchmarks", ":!benchmarks/results")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a benchmark of the last commit failed."""
    options = _options(arguments)
    conf = _configuration()
    asked = history.last_commits(options.commits) if options.commits else []
    if not options.page_only:
        _measure(options, conf, asked)
    _asv("publish", "--no-pull")
    results = history.results_until(conf.results_dir, asked or history.ancestors("HEAD"))
    if options.keep:
        history.keep(results, Path(conf.results_dir), options.keep)
    page, failed = write_page(conf, results)
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
        "--commits",
        metavar="N",
        type=int,
        help="measure the last N commits that touch the code, except those with results",
    )
    parser.add_argument(
        "--keep",
        metavar="MACHINE",
        help="copy these results to benchmarks/results/asv, to be committed, under this name",
    )
    parser.add_argument(
        "--page-only", action="store_true", help="only make the page, from existing results"
    )
    return parser.parse_args(arguments)


def _configuration() -> Config:
    conf = Config.load(str(HERE / "asv.conf.json"))
    conf.results_dir = str((HERE / conf.results_dir).resolve())
    conf.html_dir = str((HERE / conf.html_dir).resolve())
    return conf


def _measure(options: argparse.Namespace, conf: Config, commits: Sequence[str]) -> None:
    """The commits without results; without any, this one."""
    _refuse_changes()
    _machine()
    if not commits:
        _run(options, git("rev-parse", "HEAD"), ROOT)
        return
    _describe()
    for commit in commits:
        if not history.is_measured(conf, commit, options.bench):
            with checkout(commit) as folder:
                _run(options, commit, folder, allowed=(0, 1, 2))
    _describe()  # an earlier commit may have had fewer schemes


def _describe() -> None:
    """Let asv note what the suite has now, without measuring."""
    _asv("run", "--python=same", "--bench", "just-discover")


def _refuse_changes() -> None:
    """Exit if files changed: asv would store the results under a commit without the changes."""
    changed = git("status", "--porcelain", "--", *_MEASURED)
    if changed:
        sys.exit(f"asv stores results by commit; commit these changes first:\n{changed}")


def _machine() -> None:
    """Register this machine with asv, once, by ``asv machine --yes``."""
    if not (Path.home() / ".asv-machine.json").exists():
        _asv("machine", "--yes", stdout=subprocess.DEVNULL)  # --yes still prints its questions


def _run(
    options: argparse.Namespace, commit: str, folder: Path, allowed: Sequence[int] = (0, 2)
) -> None:
    """Measure the code in a folder, which is that of the commit, with the present suite."""
    words = ["run", "--python=same", "--set-commit-hash", commit, "--show-stderr"]
    if sys.platform != "linux":  # forking is missing, or unsafe with these libraries
        words += ["--launch-method", "spawn"]
    words += ["--quick"] * options.quick
    words += ["--bench", options.bench] if options.bench else []
    grid = {"POSENC_GRID": "full"} if options.full else {}
    code = _asv(*words, allowed=allowed, folder=folder, grid=grid)
    if code == 1:
        print(f"the suite does not serve {commit[:8]}")
    if code == 2:
        print(f"some benchmarks of {commit[:8]} failed; the page names those of the last commit")


def _asv(
    *words: str,
    allowed: Sequence[int] = (0,),
    folder: Path = ROOT,
    grid: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> int:
    """Run asv on the code in a folder, even if another posenc is installed."""
    path = [str(folder), str(folder / "backends"), os.environ.get("ASV_PYTHONPATH", "")]
    own = {"ASV_PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-m", "asv", *words]
    if words[0] != "machine":
        command += ["--config", str(HERE / "asv.conf.json")]
    env = os.environ | own | (grid or {})
    if words[0] == "run":
        with subprocess.Popen(
            command, cwd=HERE, env=env, stdout=subprocess.PIPE, text=True, errors="replace"
        ) as running:
            assert running.stdout is not None
            for line in without_skipped(running.stdout):
                print(line, end="", flush=True)
        code = running.returncode
    else:
        code = subprocess.run(command, cwd=HERE, env=env, stdout=stdout).returncode
    if code not in allowed:
        sys.exit(f"asv {words[0]} ended with {code}")
    return code


def without_skipped(lines: Iterable[str]) -> Iterator[str]:
    """What asv prints, with one line at the end for all figures that do not apply.

    asv has two lines and an empty one for each: its params, and why the suite skips it.
    """
    held, skipped, blank = "", 0, False
    for line in lines:
        if _SKIPPED in line:
            held, skipped, blank = "", skipped + 1, True
            continue
        if blank and not line.strip():
            blank = False
            continue
        yield held
        held, blank = (line, False) if "For parameters:" in line else ("", False)
        yield "" if held else line
    yield held
    if skipped:
        yield f"{skipped} figures do not apply, such as gradients in NumPy: n/a in the tables\n"


_SKIPPED = "asv: skipped:"

if __name__ == "__main__":
    sys.exit(main())
