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
from posenc.ablation.corpus import Corpus
from posenc.ablation.plots import loss_against_length
from posenc.ablation.report import write_report
from posenc.ablation.results import Record, write_tables, write_whole
from posenc.ablation.runner import plan, run_cells
from posenc.ablation.study import Cell, Study
from posenc.ablation.tables import table_markdown, table_text

_EVERY = 5.0  # seconds between two lines of progress


def compare(study: Study) -> int:
    """Run a study and write ``results.jsonl``, ``results.csv``, ``loss.png``, ``report.html``.

    Returns the exit status: 0, 1 where a run failed, 130 after Ctrl-C (what is finished is kept).
    """
    begin = time.perf_counter()
    backend, corpus = choose_backend(study.backend), study.corpus()
    records, missing = plan(study, corpus)
    progress = Progress(study, len(records), print)
    progress.header(corpus, backend)
    stopped = False
    try:
        for record in run_cells(study, missing, on_progress=progress.step):
            progress.result(record)
            records.append(record)
    except KeyboardInterrupt:
        stopped = True
        print("\nstopped; the same command goes on from here")
    wall = time.perf_counter() - begin
    summary = describe(study, corpus, backend, wall)
    _write(Path(study.out), summary, _ordered(study, records))
    failed = any(record["status"] != "ok" for record in records)
    return 130 if stopped else int(failed)


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


def _write(out: Path, summary: dict[str, Any], records: list[Record]) -> None:
    if not any(record["status"] == "ok" for record in records):
        write_tables(out, records)
        print("no run has ended yet" if not records else "every run failed")
        return
    write_tables(out, records)
    write_whole(out / "table.md", table_markdown(summary, records))
    print(f"\n{table_text(summary, records)}")
    loss_against_length(records, out / "loss.png", summary)
    write_report(summary, records, out / "report.html")
    names = ("results.csv", "results.jsonl", "table.md", "loss.png", "report.html")
    print(f"{summary['wall_seconds']:.0f} s; wrote {', '.join(str(out / name) for name in names)}")


def _ordered(study: Study, records: list[Record]) -> list[Record]:
    place = {label: n for n, label in enumerate(study.schemes)}
    return sorted(records, key=lambda record: (place[record["scheme"]], record["seed"]))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
