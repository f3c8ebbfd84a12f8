"""A study carried out: cells in processes, what is finished kept, what is missing computed."""

from __future__ import annotations

import glob
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posenc.study import run as runs
from posenc.study.corpus import Corpus
from posenc.study.results import Record, load, partial, save, sweep, write_whole
from posenc.study.study import Cell, Study, read
from posenc.study.workers import compiled_programs, processes

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
    for cell in study.cells(corpus, runs.choose_backend(study.backend)):
        record = load(folder / cell.file_name(), cell.digest())
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
    """Records of cells as they finish, each kept on disk at once.

    ``RuntimeError`` if no run could begin: the backend cannot be loaded, or not on this device.
    """
    if not missing:
        return
    folder = cells_folder(study)
    _forget_progress(folder, missing)  # of a run that was killed
    try:
        with _pool(study, len(missing), executor) as (pool, scratch):
            trial = pool.submit(try_out, missing[0], scratch)
            where = (study.text, str(folder), scratch)
            pending = {pool.submit(work, cell, *where): cell for cell in missing}
            try:
                _check_begun(trial)
                yield from _collected(pending, folder, on_progress)
            finally:
                if executor is not None:  # which goes on, unlike our own
                    for future in pending:
                        future.cancel()
    finally:
        _forget_progress(folder, missing)


def cells_folder(study: Study) -> Path:
    """Where single records are kept; made if missing, and an ``OSError`` if it cannot be."""
    folder = Path(study.out) / "cells"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = partial(folder / "probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"out: cannot write results into {study.out!r}: {reason}") from error
    sweep(folder)
    return folder


def try_out(cell: Cell, scratch: Path | None) -> str | None:
    """Why no cell could begin in this worker, tried without its scheme; None if they can."""
    try:
        runs.try_out(cell, scratch)
    except Exception as error:
        return " ".join(str(error).split())  # one line
    return None


def work(cell: Cell, text: Sequence[str], folder: str, scratch: Path | None) -> Record:
    """One cell, in a worker: never raises, so that one failure leaves the others running.

    A record of a run that ended well is written here, whole: it outlives the study's process.
    """
    home = Path(folder)
    status = _progress_file(home, cell)

    def report(step: int, loss: float) -> None:
        with suppress(OSError):  # of another machine, which has no such folder
            write_whole(status, json.dumps([step, loss]))

    try:
        record = runs.run(cell, read(tuple(text)), report, scratch)
        with suppress(OSError):  # then the study's process keeps what is returned
            save(home / cell.file_name(), record)
        return record
    except Exception as error:
        return failed(cell, error)
    finally:
        with suppress(OSError):
            status.unlink(missing_ok=True)


def failed(cell: Cell, error: BaseException) -> Record:
    """The record of a run that did not end."""
    return {
        "cell": cell.digest(),
        "scheme": cell.scheme,
        "seed": cell.seed,
        "backend": cell.backend,
        "train_len": cell.train_len,
        "status": "failed",
        "error": f"{type(error).__name__}: {error}",
    }


def _check_begun(trial: Future[str | None]) -> None:
    failure = trial.exception()  # a worker that died; so do runs, and they are records
    if failure is None and (refusal := trial.result()) is not None:
        raise RuntimeError(refusal)


def _progress_file(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.file_name()}.progress"


def _forget_progress(folder: Path, missing: Sequence[Cell]) -> None:
    for cell in missing:
        path = _progress_file(folder, cell)
        # A worker that is told to leave while it writes leaves what it had written.
        for left in (path, *folder.glob(f".{glob.escape(path.name)}.*.partial")):
            with suppress(OSError):
                left.unlink(missing_ok=True)


def _collected(
    pending: dict[Future[Record], Cell], folder: Path, on_progress: Listener
) -> Iterator[Record]:
    seen: dict[Path, Any] = {}
    news = {future: _progress_file(folder, cell) for future, cell in pending.items()}
    while pending:
        for future in [f for f in pending if f.done()]:
            one = pending.pop(future)
            failure = future.exception()  # a worker that died takes its future with it
            record = future.result() if failure is None else failed(one, failure)
            yield _kept(folder / one.file_name(), record)
        for future, one in pending.items():
            path = news[future]
            heard = _progress(path)
            if heard is not None and seen.get(path) != heard:
                seen[path] = heard
                on_progress(one, *heard)
        time.sleep(_POLL)


def _kept(path: Path, record: Record) -> Record:
    """The record, on disk: what its worker wrote, unless it failed or writes to another disk."""
    written = load(path, record["cell"])
    if written is not None and written["status"] == "ok":
        return written
    try:
        save(path, record)
    except OSError as error:
        warnings.warn(f"cannot keep {path}, so this run is made anew: {error}", stacklevel=2)
    return record


def _progress(path: Path) -> tuple[int, float] | None:
    try:
        step, loss = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return step, loss


@contextmanager
def _pool(
    study: Study, jobs: int, executor: Executor | None
) -> Iterator[tuple[Executor, Path | None]]:
    """The executor that is given, or processes of this machine, which share compiled programs.

    Workers of somebody else live on, and what compiles there is not ours to set.
    """
    if executor is not None:
        yield executor, None
        return
    cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
    on_cpu = study.device in ("auto", "cpu")
    count = study.workers or (min(cores or 1, jobs) if on_cpu else 1)
    with compiled_programs() as scratch, processes(count, scratch) as pool:
        yield pool, scratch
