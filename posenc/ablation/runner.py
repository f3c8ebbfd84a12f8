"""A study carried out: cells in processes, what is finished kept, what is missing computed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from posenc.ablation import cell as cells
from posenc.ablation.corpus import Corpus
from posenc.ablation.results import Record, load, save, write_whole
from posenc.ablation.study import Cell, Study, read

Listener = Callable[[Cell, int, float], None]
_POLL = 0.2  # seconds between two looks at the workers


def run_study(
    study: Study,
    corpus: Corpus,
    *,
    executor: Executor | None = None,
    on_progress: Listener = lambda cell, step, loss: None,
) -> Iterator[Record]:
    """The records of a study as they finish; those that an earlier run finished come first.

    Parameters
    ----------
    executor
        Anything with ``submit(function, *args) -> Future``: processes of this machine by default,
        ``dask.distributed.Client().get_executor()`` for many.
    on_progress
        Hears of ``(cell, step, bits per byte)`` on the way.

    A run that fails is a record with ``status`` ``"failed"``, and is tried again the next time.
    Workers import the main module anew, so a script guards its own by ``__name__ == "__main__"``.
    """
    kept, missing = plan(study, corpus)
    yield from kept
    yield from run_cells(study, missing, executor=executor, on_progress=on_progress)


def plan(study: Study, corpus: Corpus) -> tuple[list[Record], list[Cell]]:
    """What an earlier run finished, and the cells that are missing."""
    folder = cells_folder(study)
    kept, missing = [], []
    for cell in study.cells(corpus, cells.choose_backend(study.backend)):
        record = load(folder / cell.file_name())
        if record is None or record["status"] != "ok":
            missing.append(cell)
        else:
            kept.append(record)
    return kept, missing


def run_cells(
    study: Study,
    missing: Sequence[Cell],
    *,
    executor: Executor | None = None,
    on_progress: Listener = lambda cell, step, loss: None,
) -> Iterator[Record]:
    """Records of cells as they finish, each kept on disk at once."""
    if not missing:
        return
    folder = cells_folder(study)
    with _workers(study, len(missing)) if executor is None else nullcontext(executor) as pool:
        pending = {pool.submit(work, cell, study.text, str(folder)): cell for cell in missing}
        yield from _collected(pending, folder, on_progress)


def cells_folder(study: Study) -> Path:
    """Where single records are kept; made if missing, and an ``OSError`` if it cannot be."""
    folder = Path(study.out) / "cells"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"out: cannot write results into {study.out!r}: {reason}") from error
    return folder


def work(cell: Cell, text: Sequence[str], folder: str) -> Record:
    """One cell, in a worker: never raises, so that one failure leaves the others running."""
    status = Path(folder) / f"{cell.file_name()}.progress"
    scratch = Path(folder) / "compiled"

    def report(step: int, loss: float) -> None:
        write_whole(status, json.dumps([step, loss]))

    try:
        return cells.run(cell, read(tuple(text)), report, scratch)
    except Exception as error:
        return failed(cell, error)
    finally:
        status.unlink(missing_ok=True)


def failed(cell: Cell, error: BaseException) -> Record:
    """The record of a run that did not end."""
    return {
        "scheme": cell.scheme,
        "seed": cell.seed,
        "backend": cell.backend,
        "train_len": cell.train_len,
        "status": "failed",
        "error": f"{type(error).__name__}: {error}",
    }


def _collected(
    pending: dict[Future[Record], Cell], folder: Path, on_progress: Listener
) -> Iterator[Record]:
    seen: dict[str, Any] = {}
    while pending:
        for future in [f for f in pending if f.done()]:
            one = pending.pop(future)
            failure = future.exception()  # a worker that died takes its future with it
            record = future.result() if failure is None else failed(one, failure)
            save(folder / one.file_name(), record)
            yield record
        for one in pending.values():
            news = _progress(folder / f"{one.file_name()}.progress")
            if news is not None and seen.get(one.file_name()) != news:
                seen[one.file_name()] = news
                on_progress(one, *news)
        time.sleep(_POLL)


def _progress(path: Path) -> tuple[int, float] | None:
    try:
        step, loss = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return step, loss


@contextmanager
def _workers(study: Study, jobs: int) -> Iterator[Executor]:
    """Single-threaded processes; on the way out they are stopped, whatever they were doing."""
    cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
    on_cpu = study.device in ("auto", "cpu")
    count = study.workers or (min(cores or 1, jobs) if on_cpu else 1)
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), initializer=_single_threaded
    )
    try:
        yield pool
        pool.shutdown()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()


def _single_threaded() -> None:
    """Two workers of one thread are faster than one of two, and their results do not vary."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
        os.environ[name] = "1"
