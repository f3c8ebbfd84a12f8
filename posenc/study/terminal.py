"""What ``posenc compare`` prints and writes: progress, then tables, figures and the report."""

from __future__ import annotations

import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from posenc.cli.picture import FORMATS
from posenc.study.columns import shortened
from posenc.study.comparisons import comparisons_csv
from posenc.study.corpus import Corpus, printable
from posenc.study.origin import command, commit, cores, processor
from posenc.study.outputs import holds_results, publish
from posenc.study.plots import loss_against_length
from posenc.study.report import write_report
from posenc.study.results import Record, seconds, write_tables, write_whole
from posenc.study.run import Run
from posenc.study.runner import compute, plan
from posenc.study.specs import fitted_settings
from posenc.study.stopping import exit_status
from posenc.study.study import Study
from posenc.study.tables import table_markdown, table_text
from posenc.study.trainer import choose_backend

_EVERY, _SHARE = 5.0, 0.02  # seconds between two lines of progress, and of all that passed
_INDENT, _SHORTEST = " " * 8, 12  # columns; what a name keeps where a line must be cut


def compare(study: Study) -> int:
    """Run a study and write its results, tables, figures and report into ``study.out``.

    Returns the exit status: 0, 1 where a run failed, 130 after Ctrl-C and 143 after SIGTERM (what
    is finished is kept).
    """
    backend, corpus = choose_backend(study.backend), study.corpus()
    records, missing = plan(study, corpus)
    runs = [record["run"] for record in records] + [run.digest() for run in missing]
    progress = Progress(study, len(records), print)
    progress.header(corpus, backend)
    status = 0
    try:
        for record in compute(study, missing, on_progress=progress.step):
            progress.result(record)
            records.append(record)
    except KeyboardInterrupt as stop:
        status = exit_status(stop)
        print("\nstopped; the same command goes on from here")
    took = seconds(records)
    summary = _printable(describe(study, corpus, backend, took["wall_seconds"]) | took)
    _write(Path(study.out), summary, _ordered(study, records), runs)
    failed = any(record["status"] != "ok" for record in records)
    return status or int(failed)


def describe(study: Study, corpus: Corpus, backend: str, wall: float) -> dict[str, Any]:
    """All that a reader must know to judge or to repeat a study."""
    origin = {"posenc commit": commit()}
    return {
        "command": command(study),
        "fitted": fitted_settings(study.schemes, study),
        "config": {**asdict(study), "backend": backend},
        "corpus": {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "train_bytes": len(corpus.train),
            "validation_bytes": len(corpus.validation),
            "train_files": corpus.train_files,
            "validation_files": corpus.validation_files,
        },
        "versions": {
            "posenc": _version("posenc"),
            **{name: value for name, value in origin.items() if value},
            "python": platform.python_version(),
            "numpy": _version("numpy"),
            backend: _version(backend),
            "machine": f"{platform.system()} {platform.machine()}",
            "processor": processor(),
            "cores": str(cores()),
        },
        "wall_seconds": wall,
    }


class Progress:
    """Lines about a study that runs: when it begins, now and then, at the end of each run."""

    def __init__(self, study: Study, kept: int, say: Callable[[str], None]) -> None:
        self._study, self._say = study, say
        self._total = len(study.schemes) * study.seeds
        self._kept = self._done = kept
        self._begin = time.perf_counter()
        self._said: float | None = None
        self._first: tuple[float, int] | None = None  # the first report: when, and steps by then
        self._steps: dict[tuple[str, int], int] = {}
        self._seconds = {"train_seconds": 0.0, "eval_seconds": 0.0}  # of the runs that ended

    def header(self, corpus: Corpus, backend: str) -> None:
        """What is going to happen."""
        study = self._study
        lengths = ", ".join(map(str, study.eval_lens))
        self._wrapped(
            f"{corpus.name}: {len(corpus.train) / 1e6:.1f} MB to train, "
            f"{len(corpus.validation) / 1e6:.1f} MB held out (sha256 {corpus.sha256[:12]})"
        )
        self._wrapped(
            f"{len(study.schemes)} schemes x {study.seeds} seeds with {backend}: {study.layers} "
            f"layers, width {study.dim}, {study.heads} heads; {study.steps} steps of "
            f"{study.batch_size} x {study.train_len} bytes; scored at {lengths}"
        )
        if self._kept:
            self._say(f"{self._kept} of {self._total} runs are kept from before")
        sys.stdout.flush()

    def step(self, run: Run, step: int, loss: float) -> None:
        """A run moved on; said now and then, and less often the longer it all takes."""
        now = time.perf_counter()
        self._steps[run.scheme, run.seed] = step
        if self._first is None:
            self._first = now, sum(self._steps.values())
        pause = max(_EVERY, _SHARE * (now - self._begin))
        if self._said is None or now - self._said >= pause:
            self._said = now
            at = f"step {step} of {run.steps}" if step < run.steps else "trained, now scored"
            seed, left = f" seed {run.seed}: ", self._left(now)
            forms = [f"{at}, {loss:.2f} bits/byte{left}", f"{at}{left}", at]
            self._say(_line(_INDENT, run.scheme, [f"{seed}{form}" for form in forms]))
            sys.stdout.flush()

    def result(self, record: Record) -> None:
        """A run ended."""
        self._done += 1
        self._steps.pop((record["scheme"], record["seed"]), None)
        place = f"[{self._done:{len(str(self._total))}}/{self._total}] "
        name, seed = record["scheme"], f" seed {record['seed']}"
        if record["status"] != "ok":
            self._wrapped(f"{place}{name}{seed}: failed: {record['error']}")
        else:
            for part in self._seconds:
                self._seconds[part] += record[part]
            at = sorted(record["loss"], key=int)  # JSON sorts them as words
            losses = [f"{length}: {record['loss'][length]:.3f}" for length in at]
            self._say(_line(place, name, [f"{seed}  {some}" for some in _fewer(losses)]))
        self._said = time.perf_counter()
        sys.stdout.flush()

    def _wrapped(self, text: str) -> None:
        whole = textwrap.TextWrapper(break_long_words=False, break_on_hyphens=False)
        whole.width, whole.subsequent_indent = _width(), "  "
        self._say(whole.fill(text))

    def _left(self, now: float) -> str:
        """How long the rest takes, as long as what was done; at least, before any run has ended."""
        missing, ended = self._total - self._kept, self._done - self._kept
        stepped = sum(self._steps.values())
        train, both = self._seconds["train_seconds"], sum(self._seconds.values())
        if both:
            done = ended + stepped / self._study.steps * train / both
            return f", about {_duration((now - self._begin) * (missing - done) / done)} left"
        # No run has shown yet what scoring takes, so this is of steps alone.
        then, before = self._first or (now, stepped)
        if stepped <= before:
            return ""
        seconds = (missing * self._study.steps - stepped) * (now - then) / (stepped - before)
        return f", more than {_duration(seconds)} left"


def _line(start: str, name: str, forms: Sequence[str]) -> str:
    """One line of the terminal: the first form of its end that fits, beside a shortened name."""
    room = _width() - len(start)
    fitting = [form for form in forms if min(len(name), _SHORTEST) + len(form) <= room]
    end = [*fitting, forms[-1]][0]
    return start + shortened(name, max(_SHORTEST, room - len(end))) + end


def _fewer(losses: list[str]) -> list[str]:
    """All losses, then fewer and fewer, the middle ones left out first; the last two stay."""
    forms = ["  ".join(losses)]
    for kept in range(len(losses) - 1, 1, -1):
        front = (kept + 1) // 2
        forms.append("  ".join([*losses[:front], "…", *losses[front - kept :]]))
    return forms


def _duration(seconds: float) -> str:
    if seconds > 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def _width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return max(40, shutil.get_terminal_size().columns)


def _write(out: Path, summary: dict[str, Any], records: list[Record], runs: list[str]) -> None:
    ended = any(record["status"] == "ok" for record in records)
    if not ended:
        print("every run failed" if records else "no run has ended yet")
        if holds_results(out):
            print(f"the files in {out} are of an earlier study, and stay")
        if not records or holds_results(out):
            return

    def render(folder: Path) -> None:
        write_tables(folder, records)
        if ended:
            write_whole(folder / "differences.csv", comparisons_csv(summary, records))
            write_whole(folder / "table.md", table_markdown(summary, records))
            for form in FORMATS:
                loss_against_length(records, folder / f"loss.{form}", summary, form)
            write_report(summary, records, folder / "report.html")

    names, earlier = publish(out, summary, records, runs, render)
    if earlier is not None:
        print(f"files of an earlier study are kept in {earlier}")
    if ended:
        print(f"\n{table_text(summary, records, _width())}")
    print(f"\n{summary['wall_seconds']:.0f} s; wrote")
    for name in names:
        print(f"  {out / name}")


def _ordered(study: Study, records: list[Record]) -> list[Record]:
    place = {label: n for n, label in enumerate(study.schemes)}
    return sorted(records, key=lambda record: (place[record["scheme"]], record["seed"]))


def _printable(value: Any) -> Any:
    """The same without bytes that are no UTF-8, which names of files may hold."""
    if isinstance(value, dict):
        return {key: _printable(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map(_printable, value))
    return printable(value) if isinstance(value, str) else value


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
