"""Shows that the tests bite: known faults are planted one at a time, and each must be noticed.

``python tests/mutations/run.py``, from anywhere. Each fault of ``faults/`` goes into a copy of
the sources, and the tests it names run there: those of the quick part, and where these notice
nothing, those of the long part. It is caught if a test fails; a test that breaks because the
planted code does is no catch. The same tests must pass on a copy without a fault.
A share of the faults, too, fails if any fault at all names a test that is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

# Read when a framework is imported: more threads than cores are slower, and fork copies only one.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ.pop("PYTEST_ADDOPTS", None)

import pytest  # noqa: E402
from faults import FAULTS, ROOT, Fault  # noqa: E402

COPIED = (
    "posenc", "backends", "benchmarks", "docs", "examples", "tests", "pyproject.toml", "README.md",
    "CHANGELOG.md",
)  # fmt: skip
PACKAGES = ("posenc", "posenc_torch", "posenc_jax")
# Imported before the first fork, so that no run waits for them; nothing of posenc, which differs.
WARM = (
    "array_api_compat.numpy", "array_api_compat.torch", "array_api_strict",
    "hypothesis.extra.numpy", "jax.numpy", "mpmath", "numpy", "torch",
)  # fmt: skip
OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not exhaustive",
    "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning",  # hypothesis
)  # fmt: skip
LIMIT = 300.0  # seconds for one run of tests
MOST = 2000  # characters of an error; a pipe holds 65536 bytes before anyone reads them
# What planted code that cannot run raises: a test that fails of it has noticed nothing.
BROKEN = (SyntaxError, ImportError, NameError, AttributeError)


@dataclass(frozen=True)
class Task:
    """Tests to run on one copy of the sources; without a fault they must pass."""

    name: str
    tests: tuple[str, ...]
    fault: Fault | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``caught``, ``passed``, or another word for what must not be."""

    task: Task
    ended: str
    detail: str = ""
    error: str = ""
    seconds: float = 0.0
    late: bool = False  # caught by a test of the long part alone, where the quick part has some

    @property
    def good(self) -> bool:
        """Whether it is as it should be."""
        return self.ended == ("passed" if self.task.fault is None else "caught")


class Watch:
    """A plugin of pytest: which tests run, and which fails first."""

    def __init__(self, task: Task) -> None:
        self._tests = [target.split() for target in task.tests]
        self._thorough = task.fault is not None
        self._late: set[str] = set()
        self.failed = self.error = ""
        self.broken = self.late = False

    def pytest_collection(self) -> None:
        """After the conftest, before the tests: the first example found will do."""
        from hypothesis import Phase, settings

        quick = settings(settings.default, phases=[Phase.explicit, Phase.generate])
        settings.register_profile("mutations", quick)
        settings.load_profile("mutations")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests of the quick part; where it has none of such an id, those of the long part.

        With a fault, all others of the long part after them.
        """
        chosen: dict[pytest.Item, None] = {}
        later: dict[pytest.Item, None] = {}
        tried = [item for item in items if not item.get_closest_marker("exhaustive")]
        for words in self._tests:
            own = [item for item in tried if all(word in item.nodeid for word in words)]
            quick = [item for item in own if not item.get_closest_marker("long")]
            chosen |= dict.fromkeys(quick or own)
            later |= dict.fromkeys(own if self._thorough else ())
        soon = [item for item in items if item in chosen]
        late = [item for item in items if item in later and item not in chosen]
        self._late = {item.nodeid for item in late}
        items[:] = soon + late

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        if self.failed:
            return
        self.failed = node.nodeid.removeprefix("tests/")
        self.late = node.nodeid in self._late
        self.error = f"{call.excinfo.type.__name__}: {call.excinfo.value}"[:MOST]
        # A law reports any exception as its own, raised from the first.
        causes, error = [], call.excinfo.value
        while error is not None:
            causes.append(error)
            error = error.__cause__
        self.broken = report.when != "call" or any(isinstance(e, BROKEN) for e in causes)

    def ended(self, code: int) -> tuple[str, str]:
        """A word, and the test or the error."""
        if self.broken:
            return "broken", self.failed
        if self.failed and code == pytest.ExitCode.TESTS_FAILED:
            return "caught", self.failed
        if code == pytest.ExitCode.OK:
            return "passed", ""
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            return "no test", "none has such an id"
        return "error", f"pytest ended with {code}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole run; 0 if every fault is caught."""
    options = _options(arguments)
    which, of = options.share
    faults = [f for f in FAULTS[which % of :: of] if not options.only or f.name in options.only]
    started = time.monotonic()
    tasks = [*_unmutated(faults), *(Task(f.name, f.tests, f) for f in faults)]
    outcomes: list[Outcome] = [] if options.only else _renamed()
    for outcome in outcomes:
        print(_line(outcome, options.verbose), flush=True)
    with tempfile.TemporaryDirectory(prefix="posenc-mutations-") as scratch:
        # Read when JAX is imported: a run compiles only the programs that its fault changes.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{scratch}/jax")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        for name in WARM:
            importlib.import_module(name)
        while tasks:
            for outcome in _all(tasks, Path(scratch), options.jobs):
                print(_line(outcome, options.verbose), flush=True)
                outcomes.append(outcome)
            late = {o.detail for o in outcomes if o.late and o.good and o.task in tasks}
            named = sorted(f"{Path(test.partition('::')[0]).name} {test}" for test in late)
            tasks = [Task("no fault, tests of the long part", tuple(named))] if named else []
    bad = [o for o in outcomes if not o.good]
    caught = sum(o.task.fault is not None and o.good for o in outcomes)
    seconds = time.monotonic() - started
    print(f"{caught} of {len(faults)} faults caught, {len(bad)} failures, in {seconds:.0f} s")
    return 1 if bad else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these faults alone")
    parser.add_argument(
        "--share", type=_share, default=(0, 1), metavar="K/N",
        help="every N-th fault, from the K-th: runs that count K up try all in turn",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at once")
    parser.add_argument("--verbose", action="store_true", help="with the error of each test")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - {fault.name for fault in FAULTS}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if options.only and options.share[1] > 1:
        parser.error("give --only or --share, not both")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    return options


def _share(text: str) -> tuple[int, int]:
    which, of = map(int, text.split("/"))
    if which < 0 or of < 1:
        raise ValueError(text)
    return which, of


def _renamed() -> list[Outcome]:
    """Faults of which some words are in no test's id; a share tries few, so all are looked at."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{listed.stdout[-MOST:]}{listed.stderr[-MOST:]}")
    ids: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        ids.setdefault(Path(line.partition("::")[0]).name, []).append(line)
    return [
        Outcome(Task(fault.name, fault.tests, fault), "no test", target)
        for fault in FAULTS
        for target in fault.tests
        if not any(
            all(word in found for word in target.split())
            for found in ids.get(target.split()[0], [])
        )
    ]


def _unmutated(faults: Sequence[Fault]) -> list[Task]:
    """The tests of all faults, a task for each file."""
    files: dict[str, set[str]] = {}
    for target in {target for fault in faults for target in fault.tests}:
        files.setdefault(target.split()[0], set()).add(target)
    return [Task(f"no fault, {file}", tuple(sorted(files[file]))) for file in sorted(files)]


def _all(tasks: Sequence[Task], scratch: Path, jobs: int) -> Iterator[Outcome]:
    """Outcomes of all tasks as they end, ``jobs`` at once, each in a process of its own."""
    waiting, running = list(reversed(tasks)), dict[Any, _Run]()
    while waiting or running:
        while waiting and len(running) < jobs:
            run = _Run(waiting.pop(), scratch)
            running[run.process.sentinel] = run
        connection.wait(list(running), timeout=1.0)
        for sentinel, run in list(running.items()):
            if (outcome := run.outcome()) is not None:
                del running[sentinel]
                yield outcome


class _Run:
    """A task in a process forked from this one, on a copy of the sources of its own."""

    def __init__(self, task: Task, scratch: Path) -> None:
        self._task, self._started = task, time.monotonic()
        self._folder = Path(tempfile.mkdtemp(dir=scratch))
        self._answer, sender = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_child, args=(task, self._folder, sender))
        self.process.start()
        sender.close()

    def outcome(self) -> Outcome | None:
        """How it ended; None while it runs."""
        seconds = time.monotonic() - self._started
        if self.process.is_alive():
            if seconds < LIMIT:
                return None
            self.process.kill()
        self.process.join()
        found = Outcome(self._task, "died", f"process ended with {self.process.exitcode}")
        if self._answer.poll():
            with contextlib.suppress(EOFError, OSError):  # it died before, or while it answered
                found = self._answer.recv()
        found = replace(found, seconds=seconds)
        if not found.good:
            log = self._folder / "log"
            tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            found = replace(found, error=f"{found.error}\n{tail}")
        shutil.rmtree(self._folder, ignore_errors=True)
        return found


def _child(task: Task, folder: Path, sender: Any) -> None:
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        sender.send(_tried(task, folder / "copy"))
    except Exception as error:
        sender.send(Outcome(task, "error", f"{type(error).__name__}: {error}"))


def _tried(task: Task, copy: Path) -> Outcome:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    if task.fault is not None:
        _plant(task.fault, copy)
    _import_from(copy)
    watch = Watch(task)
    names = {target.split()[0] for target in task.tests}
    files = sorted(str(file) for name in names for file in Path("tests").rglob(name))
    code = pytest.main([*OPTIONS, f"--rootdir={copy}", *files], plugins=[watch])
    return Outcome(task, *watch.ended(code), error=watch.error, late=watch.late)


def _import_from(copy: Path) -> None:
    """This process sees the packages of the copy, though others may be installed."""
    sys.dont_write_bytecode = True
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "backends")]
    for package in PACKAGES:
        found = importlib.import_module(package).__file__
        if found is None or not Path(found).is_relative_to(copy):
            raise RuntimeError(f"{package} was imported from {found}, not from the copy")


def _plant(fault: Fault, copy: Path) -> None:
    file = copy / fault.file
    file.write_text(file.read_text().replace(fault.old, fault.new))


def _line(outcome: Outcome, verbose: bool) -> str:
    word = outcome.ended if outcome.good else outcome.ended.upper()
    if outcome.task.fault is not None and outcome.ended == "passed":
        word = "SURVIVED"
    line = f"{outcome.seconds:6.1f} s  {word:8}  {outcome.task.name}  {outcome.detail}".rstrip()
    return f"{line}\n{outcome.error}\n" if outcome.error and (verbose or not outcome.good) else line


if __name__ == "__main__":
    raise SystemExit(main())
