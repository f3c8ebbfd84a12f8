"""Carries out a study: runs in processes, finished runs kept, missing runs computed.

Runs that share a training are one job. A run that is added later trains again.
"""

from __future__ import annotations

import glob
import json
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posenc.study import run as runs
from posenc.study import weights
from posenc.study.checkpoints import remove_stale
from posenc.study.corpus import Corpus
from posenc.study.desk import Desk, progress_name
from posenc.study.results import (
    RECORDS,
    Record,
    load,
    own_folder,
    save,
)
from posenc.study.run import Run
from posenc.study.study import Study, read_corpus, read_tokens
from posenc.study.sweeps import Values, choose
from posenc.study.tasks.catalogue import TEXT
from posenc.study.trackers import Tracker, Trackers
from posenc.study.trainer import choose_backend
from posenc.study.usage import Usage
from posenc.study.workers import LostPoolError, compile_cache, worker_pool

OnProgress = Callable[[Run, int, float], None]
Log = Callable[[Run, int, Mapping[str, float]], None]  # ``log`` of a tracker
_Progress = tuple[int, int, dict[str, float]]  # which run of a job, its step, what trackers get
RUNS, TUNING = "runs", "tuning"  # folders of records: of results, and of a sweep
_POLL = 0.2  # seconds between two looks at the workers
_DEATHS = 2  # of workers in a row, without a run that finished between, that end a study
_LOST = "the executor gave the runs up; finished ones are kept, and the same call continues"
_DIED = (
    "its worker process died: it was killed, perhaps for want of memory, which fewer workers need "
    "less of; or it could not start, where a script does not guard its own by __name__"
)


def run_study(
    study: Study,
    corpus: Corpus | None,
    *,
    executor: Executor | None = None,
    on_progress: OnProgress = lambda run, step, loss: None,
    trackers: Sequence[Tracker] = (),
) -> Iterator[Record]:
    """The records of a study as they finish; those that are already on disk come first.

    Parameters
    ----------
    executor
        Anything with ``submit(function, *args) -> Future``. By default the workers of
        ``study.scheduler``, or processes of this machine. A process of another executor should
        call ``posenc.study.workers.one_thread`` first.
    on_progress
        Called with ``(run, step, loss in bits)`` during training. Steps of fine-tuning count on.
    trackers
        Are told the same and more, and every record; see ``Tracker``.

    A run that fails is a record with ``status`` ``"failed"``, and is tried again the next time.
    With a sweep, its values are tried first; their records stay on disk.
    Workers import the main module anew, so a script guards its own by ``__name__ == "__main__"``.
    """
    tracker = Trackers(trackers)

    def log(run: Run, step: int, values: Mapping[str, float]) -> None:
        on_progress(run, step, values["loss"])
        tracker.log(run, step, values)

    def computed(runs: Sequence[Run]) -> Iterator[Record]:
        for record in compute(study, runs, executor=executor, log=log):
            tracker.finish(record)
            yield record

    try:
        tried, untried = plan_tuning(study, corpus)
        tried += computed(untried)
        kept, missing = plan(study, corpus, tried)
        yield from kept
        yield from computed(missing)
    finally:
        tracker.close()


def plan(
    study: Study, corpus: Corpus | None, tried: Sequence[Record] = (), *, writes: bool = True
) -> tuple[list[Record], list[Run]]:
    """The records that are already on disk, and the runs that are missing.

    ``tried`` are the records of a sweep, whose choices the runs then have. Unless ``writes``, no
    folder is made.
    """
    backend = choose_backend(study.backend)
    by_run = {record["run"]: record for record in tried}
    chosen: dict[str, dict[str, Values]] = {}
    for tuning, trials in study.trials(corpus, backend) if tried else ():
        values = choose(tuning, [by_run[run.digest()] for run in trials])
        chosen.setdefault(tuning.key, {}).update(dict.fromkeys(tuning.labels, values))
    every = study.runs(corpus, backend, chosen)
    if not writes:
        home = Path(study.out, weights.FOLDER) if study.keep_weights else None
        return _on_disk(Path(study.out, RUNS), every, home)
    return _on_disk(runs_folder(study), every, weights_folder(study))


def plan_tuning(
    study: Study, corpus: Corpus | None, *, writes: bool = True
) -> tuple[list[Record], list[Run]]:
    """The records of a sweep that are already on disk, and its runs that are missing."""
    if not study.tunings:
        return [], []
    trials = study.trials(corpus, choose_backend(study.backend))
    folder = runs_folder(study, TUNING) if writes else Path(study.out, TUNING)
    return _on_disk(folder, [run for _, each in trials for run in each])


def _on_disk(
    folder: Path, every: Iterable[Run], home: Path | None = None
) -> tuple[list[Record], list[Run]]:
    kept, missing = [], []
    for run in every:
        record = load(folder / run.file_name(), run.digest())
        if record is None or not _is_kept(record) or _lacks_weights(home, run):
            missing.append(run)
        else:
            kept.append(record)
    return kept, missing


def _is_kept(record: Record) -> bool:
    return bool(record["status"] in ("ok", "diverged"))


def without_weights(study: Study, missing: Iterable[Run]) -> int:
    """How many of the missing runs are finished, and lack only the weights that are to be kept."""
    folder = runs_folder(study)
    records = (load(folder / run.file_name(), run.digest()) for run in missing)
    return sum(record is not None and record["status"] == "ok" for record in records)


def compute(
    study: Study,
    missing: Sequence[Run],
    *,
    executor: Executor | None = None,
    log: Log = lambda run, step, values: None,
) -> Iterator[Record]:
    """Records of the missing runs as they finish, each kept on disk at once.

    ``log`` is called during training, as that of a ``Tracker``.

    A worker that is killed takes the others with it. New ones then go on with what is left, from
    the checkpoints, unless workers die again and no run has finished between.

    ``RuntimeError`` if no run can begin: the backend or its device cannot be used.
    """
    if not missing:
        return
    tuning = bool(missing[0].tuning)
    folder = runs_folder(study, TUNING if tuning else RUNS)
    home = None if tuning else weights_folder(study)
    _remove_progress_files(folder, missing)  # of a study that was killed
    remove_stale(folder, [d for run in missing for d in (run.training_digest(), run.digest())])
    left, deaths = missing, 0
    try:
        while left:
            lost: list[Run] = []
            with _pool(study, jobs(left), executor) as (pool, scratch):
                trial = pool.submit(why_none_can_train, left[0], scratch, study.keep_weights)
                files = study.tokens or study.text
                where = (files, str(folder), scratch, None if home is None else str(home))
                pending = {_begin(pool, job, *where): job for job in jobs(left)}
                try:
                    _check_trial(trial)
                    lost = yield from _collect(pending, folder, home, log)
                finally:
                    if executor is not None:  # the caller's executor outlives the study
                        for future in pending:
                            future.cancel()
            deaths = deaths + 1 if len(lost) == len(left) else 1
            left = lost if executor is None and deaths < _DEATHS else ()
            if left:
                message = f"a worker process died, so new ones go on with {len(lost)} runs"
                warnings.warn(message, stacklevel=2)
                continue
            for run in lost:
                record = runs.failure_record(run, RuntimeError(_DIED))
                yield _keep(folder / run.file_name(), record)
    finally:
        _remove_progress_files(folder, missing)


def jobs(missing: Iterable[Run]) -> list[tuple[Run, ...]]:
    """Runs grouped by the training that they share, in their order."""
    shared: dict[str, list[Run]] = {}
    for run in missing:
        shared.setdefault(run.training_digest(), []).append(run)
    return [tuple(job) for job in shared.values()]


def runs_folder(study: Study, name: str = RUNS) -> Path:
    """The folder of records, of results or of a sweep; made if missing.

    ``OSError`` if it cannot be written.
    """
    return own_folder(study.out, name, RECORDS)


def weights_folder(study: Study) -> Path | None:
    """The folder of trained weights, likewise; None if none are to be kept."""
    return own_folder(study.out, weights.FOLDER, weights.NAMES) if study.keep_weights else None


def why_none_can_train(run: Run, scratch: Path | None, keep_weights: bool = False) -> str | None:
    """The reason why no run can begin in this worker, or None."""
    try:
        runs.check_can_train(run, scratch, keep_weights)
    except Exception as error:
        return " ".join(str(error).split())  # one line
    return None


def work(
    job: Sequence[Run],
    text: Sequence[str],
    folder: str,
    scratch: Path | None,
    weights_home: str | None = None,
) -> list[Record]:
    """Runs that share a training, in a worker; it never raises, so a failure stops no other job.

    The worker writes the record of a finished run itself, so the record survives the study's
    process; before it, the weights, if there is a folder for them.
    """
    home = None if weights_home is None else Path(weights_home)
    desk = Desk(job[0], Path(folder), home)
    size = job[0].vocabulary_size

    def corpus() -> Corpus:
        return read_tokens(tuple(text), size) if size else read_corpus(tuple(text))

    return work_at(desk, job, corpus, scratch)


def work_at(
    desk: Desk, job: Sequence[Run], text: Callable[[], Corpus], scratch: Path | None
) -> list[Record]:
    """``work`` with what it makes put on ``desk``; ``text`` is called for the task of that name."""
    records: list[Record] = []
    usage = Usage(job[0])

    def report(step: int, loss: float) -> None:
        desk.report(len(records), step, {"loss": loss, **usage.since_last(step)})

    try:
        corpus = text() if job[0].task == TEXT else None
        for record in runs.carry_out(job, corpus, report, scratch, desk.checkpoint, desk.keep):
            if _is_kept(record):
                desk.save(job[len(records)], record)
            records.append(record)
        desk.checkpoint.remove()
        return records
    except Exception as error:
        return [*records, *(runs.failure_record(run, error) for run in job[len(records) :])]
    finally:
        desk.leave()


def _begin(pool: Executor, job: Sequence[Run], *where: Any) -> Future[list[Record]]:
    """``work`` in the executor, or what an executor that shares no folder has in place of it."""
    own: Callable[..., Future[list[Record]]] | None = getattr(pool, "begin", None)
    return pool.submit(work, job, *where) if own is None else own(job, *where)


def _check_trial(trial: Future[str | None]) -> None:
    if trial.cancelled():
        raise LostPoolError(_LOST)
    died = trial.exception()  # a dead worker fails single runs, and these become records
    if died is None and (reason := trial.result()) is not None:
        raise RuntimeError(reason)


def _progress_file(folder: Path, run: Run) -> Path:
    return folder / progress_name(run)


def _remove_progress_files(folder: Path, missing: Sequence[Run]) -> None:
    for run in missing:
        path = _progress_file(folder, run)
        # A worker that leaves while it writes also leaves a half-written file.
        for left in (path, *folder.glob(f".{glob.escape(path.name)}.*.partial")):
            with suppress(OSError):
                left.unlink(missing_ok=True)


def _collect(
    pending: dict[Future[list[Record]], tuple[Run, ...]],
    folder: Path,
    home: Path | None,
    log: Log,
) -> Generator[Record, None, list[Run]]:
    """Records as they come; in the end, the runs that were lost with a pool of processes."""
    lost: list[Run] = []
    reported: dict[Path, _Progress] = {}
    files = {future: _progress_file(folder, job[0]) for future, job in pending.items()}
    while pending:
        for future in [f for f in pending if f.done()]:
            job = pending.pop(future)
            died = (
                LostPoolError(_LOST) if future.cancelled() else future.exception()
            )  # with its worker
            if isinstance(died, LostPoolError):
                raise died
            failed = [] if died is None else [runs.failure_record(run, died) for run in job]
            for run, record in zip(job, failed or future.result(), strict=True):
                if isinstance(died, BrokenExecutor) and not _is_finished(folder, run):
                    lost.append(run)
                    continue
                kept = _keep(folder / run.file_name(), record)
                if kept["status"] == "ok" and _lacks_weights(home, run):
                    warnings.warn(
                        f"cannot keep {home}/{weights.file_name(run)}, so this run will be "
                        "repeated: its worker could not write there",
                        stacklevel=2,
                    )
                yield kept
        for future, job in pending.items():
            path = files[future]
            progress = _read_progress(path)
            if progress is not None and reported.get(path) != progress:
                reported[path] = progress
                of_run, step, values = progress
                log(job[of_run], step, values)
        time.sleep(_POLL)
    return lost


def _is_finished(folder: Path, run: Run) -> bool:
    record = load(folder / run.file_name(), run.digest())
    return record is not None and _is_kept(record)


def _lacks_weights(home: Path | None, run: Run) -> bool:
    return home is not None and not weights.is_kept(home / weights.file_name(run), run.digest())


def _keep(path: Path, record: Record) -> Record:
    """The record as it is on disk.

    The worker wrote it, unless the run failed or the worker writes to another disk.
    """
    written = load(path, record["run"])
    if written is not None and _is_kept(written):
        return written
    try:
        save(path, record)
    except OSError as error:
        warnings.warn(f"cannot keep {path}, so this run will be repeated: {error}", stacklevel=2)
    return record


def _read_progress(path: Path) -> _Progress | None:
    try:
        of_run, step, values = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return of_run, step, values


@contextmanager
def _pool(
    study: Study, jobs: Sequence[Sequence[Run]], executor: Executor | None
) -> Iterator[tuple[Executor, Path | None]]:
    """The caller's executor, a cluster, or processes here with a folder of compiled programs.

    Workers of the caller's executor outlive the study, so where they compile is not ours to set.
    """
    if executor is not None:
        yield executor, None
        return
    if study.scheduler:
        from posenc.study.cluster import connected  # needs distributed

        every = [run for job in jobs for run in job]
        text = read_corpus(study.text) if any(run.task == TEXT for run in every) else None
        with connected(study.scheduler, every, text, study.keep_weights) as pool:
            yield pool, None
        return
    cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
    on_cpu = study.device in ("auto", "cpu")
    count = study.workers or (min(cores or 1, len(jobs)) if on_cpu else 1)
    with compile_cache() as scratch, worker_pool(count, scratch) as pool:
        yield pool, scratch
