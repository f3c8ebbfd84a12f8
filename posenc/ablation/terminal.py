"""``posenc compare`` as it is seen: progress while it works, then the table, picture and report."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from posenc.ablation.cell import choose_backend
from posenc.ablation.corpus import Corpus, printable
from posenc.ablation.outputs import holds_results, publish
from posenc.ablation.plots import loss_against_length
from posenc.ablation.report import write_report
from posenc.ablation.results import Record, seconds, write_tables, write_whole
from posenc.ablation.runner import plan, run_cells
from posenc.ablation.study import Cell, Study
from posenc.ablation.tables import table_markdown, table_text
from posenc.stopping import exit_status

_EVERY = 5.0  # seconds between two lines of progress


def compare(study: Study) -> int:
    """Run a study and write ``results.jsonl``, ``results.csv``, ``loss.png``, ``report.html``.

    Returns the exit status: 0, 1 where a run failed, 130 after Ctrl-C and 143 after SIGTERM (what
    is finished is kept).
    """
    backend, corpus = choose_backend(study.backend), study.corpus()
    records, missing = plan(study, corpus)
    runs = [record["cell"] for record in records] + [cell.digest() for cell in missing]
    progress = Progress(study, len(records), print)
    progress.header(corpus, backend)
    status = 0
    try:
        for record in run_cells(study, missing, on_progress=progress.step):
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
    return {
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
            "python": platform.python_version(),
            "numpy": _version("numpy"),
            backend: _version(backend),
            "machine": f"{platform.system()} {platform.machine()}",
        },
        "wall_seconds": wall,
    }


class Progress:
    """Lines about a study that runs: when it begins, every few seconds, at the end of each run."""

    def __init__(self, study: Study, kept: int, say: Callable[[str], None]) -> None:
        self._study, self._say = study, say
        self._total = len(study.schemes) * study.seeds
        self._kept = self._done = kept
        self._begin = self._said = time.perf_counter()
        self._steps: dict[tuple[str, int], int] = {}

    def header(self, corpus: Corpus, backend: str) -> None:
        """What is going to happen."""
        study = self._study
        lengths = ", ".join(map(str, study.eval_lens))
        self._say(
            f"{corpus.name}: {len(corpus.train) / 1e6:.1f} MB to train, "
            f"{len(corpus.validation) / 1e6:.1f} MB held out (sha256 {corpus.sha256[:12]})"
        )
        self._say(
            f"{len(study.schemes)} schemes x {study.seeds} seeds with {backend}: {study.layers} "
            f"layers, width {study.dim}, {study.heads} heads; {study.steps} steps of "
            f"{study.batch} x {study.train_len} bytes; scored at {lengths}"
        )
        if self._kept:
            self._say(f"{self._kept} of {self._total} runs are kept from before")

    def step(self, cell: Cell, step: int, loss: float) -> None:
        """A run moved on; said now and then."""
        self._steps[cell.scheme, cell.seed] = step
        now = time.perf_counter()
        if now - self._said >= _EVERY or len(self._steps) == 1:
            self._said = now
            self._say(
                f"         {cell.scheme} seed {cell.seed}: step {step} of {cell.steps}, "
                f"{loss:.2f} bits per byte{self._left()}"
            )
        sys.stdout.flush()

    def result(self, record: Record) -> None:
        """A run ended."""
        self._done += 1
        self._steps.pop((record["scheme"], record["seed"]), None)
        head = f"[{self._done:2}/{self._total}] {record['scheme']} seed {record['seed']}"
        if record["status"] != "ok":
            self._say(f"{head}: failed: {record['error']}")
            return
        losses = "  ".join(f"{length}: {loss:.3f}" for length, loss in record["loss"].items())
        self._say(f"{head}   {losses}   {record['tokens_per_second'] / 1e3:.0f}k tokens/s")
        self._said = time.perf_counter()
        sys.stdout.flush()

    def _left(self) -> str:
        steps = self._study.steps
        done = self._done - self._kept + sum(self._steps.values()) / steps
        passed = time.perf_counter() - self._begin
        if done < 0.5:
            return ""
        left = passed * (self._total - self._kept - done) / done
        return f", about {left / 60:.0f} min left" if left > 90 else f", about {left:.0f} s left"


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
            write_whole(folder / "table.md", table_markdown(summary, records))
            loss_against_length(records, folder / "loss.png", summary)
            write_report(summary, records, folder / "report.html")

    names, earlier = publish(out, summary, records, runs, render)
    if earlier is not None:
        print(f"files of an earlier study are kept in {earlier}")
    if ended:
        print(f"\n{table_text(summary, records)}")
    wrote = ", ".join(str(out / name) for name in names)
    print(f"{summary['wall_seconds']:.0f} s; wrote {wrote}")


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
