"""A study's runs on the workers of a Dask scheduler, which share nothing with the study's process.

Before its first run a worker is inspected: posenc, packages and schemes must be those of the study.
It gets the text by the network, one run after another, and sends back how far it is, records and
weights, which the study's process writes. A job whose worker is gone begins anew on another one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import threading
import time
import warnings
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from posenc.study import weights
from posenc.study.checkpoints import Checkpoint
from posenc.study.corpus import Corpus, digest
from posenc.study.desk import Desk, progress_name, progress_text
from posenc.study.identity import fingerprint, posenc_digest, versions
from posenc.study.results import RECORDS, Record, save, write_whole
from posenc.study.run import Run, difference
from posenc.study.runner import why_none_can_train, work_at
from posenc.study.specs import Plans
from posenc.study.trainer import Trainer
from posenc.study.workers import LostPoolError, one_thread

_CONNECT = 5.0  # seconds to reach the scheduler
_POLL = 0.2  # seconds between two looks at the workers
_FETCH = 60.0  # seconds for a result; its worker is then taken to be gone
_ALONE = 10.0  # seconds without workers before the study says so
_DEATHS = 2  # of the workers of one job
_PAUSE = 1.0  # seconds between two messages about a job


@contextmanager
def connected(
    address: str, runs: Sequence[Run], corpus: Corpus | None, keep_weights: bool
) -> Iterator[Cluster]:
    """The workers of a scheduler, once one of them can train the runs.

    Raises
    ------
    ImportError
        The package ``distributed`` is not installed.
    LostPoolError
        Nothing answers at the address.
    RuntimeError
        All workers that are there differ from this process; the message says in what.
    """
    client = _connect(address)
    pool = Cluster(client, address, partial(inspect, _one_of_each(runs), keep_weights), corpus)
    try:
        pool.wait()
        yield pool
    finally:
        pool.close()


def _connect(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError:
        message = "scheduler needs the package distributed: pip install 'posenc[dask]'"
        raise ImportError(message) from None
    try:
        return Client(address, timeout=_CONNECT, set_as_default=False, name="posenc")
    except (OSError, TimeoutError, ValueError, ImportError) as error:
        cause = " ".join(str(error).split())
        raise LostPoolError(f"scheduler {address!r} cannot be reached: {cause}") from None


def _one_of_each(runs: Sequence[Run]) -> list[Run]:
    """One run of each scheme: the first."""
    return list({run.scheme: run for run in reversed(runs)}.values())[::-1]


@dataclass
class _Job:
    """A call, where it runs now, and what is done with its result."""

    call: Callable[..., Any]
    needs_text: bool = False
    finish: Callable[[Any], Any] = lambda result: result
    future: Future[Any] = field(default_factory=Future)
    deaths: int = 0


@dataclass
class _Worker:
    """What the study knows of a worker; ``text`` is the corpus in its memory."""

    text: Any = None
    task: Any = None
    job: _Job | None = None  # None during the inspection
    inspected: bool = False
    reason: str | None = None  # why it is refused


class Cluster(Executor):
    """An executor that gives each fit worker one job at a time, in a thread of its own.

    ``inspect(corpus)`` is called on each worker and says why it is refused, or None.
    """

    def __init__(
        self, client: Any, address: str, inspect: Callable[..., str | None], corpus: Corpus | None
    ) -> None:
        self._client, self._address = client, address
        self._inspect, self._corpus = inspect, corpus
        self._waiting: deque[_Job] = deque()
        self._workers: dict[str, _Worker] = {}
        self._folder = Path()
        self._topic = f"posenc-{secrets.token_hex(8)}"
        self._lost: BaseException | None = None
        self._seen = time.monotonic()  # the last time that there was a worker
        self._stop, self._lock = threading.Event(), threading.Lock()
        client.subscribe_topic(self._topic, self._receive)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="posenc-cluster")
        self._thread.start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function on a fit worker."""
        return self._add(_Job(partial(function, *args, **kwargs)))

    def begin(
        self,
        job: Sequence[Run],
        text: Sequence[str],
        folder: str,
        scratch: Path | None,
        weights_home: str | None = None,
    ) -> Future[list[Record]]:
        """``runner.work`` on a worker, with what it makes written into the folders here."""
        self._folder = Path(folder)
        keep = weights_home is not None
        call = partial(work_far, self._topic, tuple(job), keep)
        finish = partial(_write_weights, None if weights_home is None else Path(weights_home))
        return self._add(_Job(call, True, finish))

    def _add(self, job: _Job) -> Future[Any]:
        with self._lock:
            if self._lost is None:
                self._waiting.append(job)
            else:
                job.future.set_exception(self._lost)
        return job.future

    def wait(self) -> None:
        """Wait for a worker that is fit; ``RuntimeError`` if all that there are were refused."""
        while self._lost is None:
            every = list(self._workers.items())
            if any(worker.inspected and worker.reason is None for _, worker in every):
                return
            if every and all(worker.reason for _, worker in every):
                more = f", and {len(every) - 1} other workers likewise" if len(every) > 1 else ""
                raise RuntimeError(f"{_refusal(*every[0])}{more}; none is left")
            time.sleep(_POLL)
        raise self._lost

    def close(self) -> None:
        """Give up what has not finished; workers notice it at their next report."""
        self._stop.set()
        self._thread.join()
        self._lose(LostPoolError("the study has ended"))
        with suppress(Exception):
            self._client.close(timeout=_CONNECT)

    def _serve(self) -> None:
        try:
            while not self._stop.wait(_POLL):
                self._look()
        except BaseException as error:  # of a thread that others wait for
            if self._client.status == "running" and not isinstance(error, OSError | CancelledError):
                self._lose(error)
            else:
                self._lose(LostPoolError(
                    f"the scheduler at {self._address!r} is lost; finished runs are kept, and the "
                    "same command continues"
                ))  # fmt: skip

    def _lose(self, error: BaseException) -> None:
        with self._lock:
            self._lost = self._lost or error
            jobs = [*self._waiting, *(w.job for w in self._workers.values() if w.job is not None)]
            self._waiting.clear()
        for worker in self._workers.values():
            _release(worker.task)
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)

    def _look(self) -> None:
        """Notice workers that came or went, take results, and give jobs to who is free."""
        if self._client.status != "running":
            raise LostPoolError
        present = self._client.scheduler_info(n_workers=-1)["workers"]
        for address in [*self._workers]:
            if address not in present:
                self._bury(self._workers.pop(address))
        for address in present:
            if address not in self._workers:
                self._meet(address)
        for address, worker in [*self._workers.items()]:
            if worker.task is not None and worker.task.done():
                self._take(address, worker)
            if worker.task is None and worker.reason is None:
                self._give(address, worker)
        self._say_if_alone()

    def _say_if_alone(self) -> None:
        now = time.monotonic()
        if any(worker.reason is None for worker in self._workers.values()):
            self._seen = now
        elif now - self._seen > _ALONE:
            self._seen = float("inf")  # once, until there is one
            warnings.warn(f"{self._address} has no worker for this study; waiting", stacklevel=1)

    def _meet(self, address: str) -> None:
        """Send a new worker the text, and have it inspected."""
        text = None
        if self._corpus is not None:
            text = self._client.scatter(self._corpus, workers=[address], hash=False)
        self._workers[address] = _Worker(text, self._send(address, self._inspect, text))

    def _send(self, address: str, call: Callable[..., Any], *arguments: Any) -> Any:
        return self._client.submit(
            call, *arguments, workers=[address], allow_other_workers=False, pure=False, retries=0
        )

    def _give(self, address: str, worker: _Worker) -> None:
        with self._lock:
            job = self._waiting.popleft() if self._waiting else None
        if job is None or (not job.deaths and not job.future.set_running_or_notify_cancel()):
            return
        worker.job = job
        worker.task = self._send(address, job.call, *([worker.text] if job.needs_text else ()))

    def _take(self, address: str, worker: _Worker) -> None:
        """Take the end of a task: a result, an error, or a worker that is gone."""
        task, job = worker.task, worker.job
        try:
            result, error = task.result(timeout=_FETCH), None
        except (Exception, CancelledError) as raised:
            result, error = None, raised
        if self._client.status != "running":
            raise LostPoolError
        worker.task = worker.job = None
        if job is None:
            worker.inspected = True
            worker.reason = result if error is None else f"{type(error).__name__}: {error}"
            if worker.reason:
                warnings.warn(_refusal(address, worker), stacklevel=1)
        elif error is None:
            job.future.set_result(job.finish(result))
        elif task.status == "error" and type(error).__name__ != "KilledWorker":
            job.future.set_exception(error)
        else:
            self._again(job)

    def _bury(self, worker: _Worker) -> None:
        _release(worker.task)
        if worker.job is not None:
            self._again(worker.job)

    def _again(self, job: _Job) -> None:
        """Let another worker begin the job, unless this one is what kills them."""
        job.deaths += 1
        if job.deaths < _DEATHS:
            warnings.warn("a worker is gone, so another one begins its run anew", stacklevel=1)
            with self._lock:
                self._waiting.appendleft(job)
        else:
            job.future.set_exception(RuntimeError(
                f"{_DEATHS} workers died of it or were stopped, perhaps for want of memory"
            ))  # fmt: skip

    def _receive(self, event: tuple[float, Any]) -> None:
        """Write what a worker has sent into the study's folder, as a worker here would."""
        name, text = event[1]
        if self._stop.is_set() or not re.fullmatch(RECORDS, name):
            return
        with suppress(OSError):
            if name.endswith(".progress"):
                write_whole(self._folder / name, text)
            else:
                save(self._folder / name, json.loads(text))


def _refusal(address: str, worker: _Worker) -> str:
    return f"the worker {address} is refused: {worker.reason}"


def _release(task: Any) -> None:
    if task is not None:
        with suppress(Exception):
            task.cancel()


def _write_weights(
    home: Path | None, result: tuple[list[Record], dict[str, bytes]]
) -> list[Record]:
    records, files = result
    for name, data in files.items() if home is not None else ():
        if re.fullmatch(weights.NAMES, name):
            with suppress(OSError):  # then the study says that they are missing
                write_whole(home / name, data)  # type: ignore[operator]  # home is not None
    return records


# What follows runs on a worker.


def inspect(runs: Sequence[Run], keep_weights: bool, corpus: Corpus | None) -> str | None:
    """Why this worker would not compute the runs as the study's own machine does, or None."""
    if "jax" in sys.modules and os.environ.get("NPROC") != "1":
        return "JAX is imported already, with a thread for each core; start the worker anew"
    one_thread()
    first = runs[0]
    present = {"posenc_digest": posenc_digest(first.backend), "versions": versions(first.backend)}
    if why := difference(first, **present):
        return why
    if corpus is not None and _digest(corpus) != corpus.sha256:
        return "the text did not arrive as it was sent"
    for run in runs:
        try:
            found = fingerprint(Plans.of(run.scheme, run), run.backend, run)
        except Exception as error:
            if run.descriptions:  # else it could not be made in the study's process either
                return f"scheme {run.scheme!r}: {type(error).__name__}: {error}"
            continue
        if why := difference(run, **found):
            return f"scheme {run.scheme!r}: {why}"
    return why_none_can_train(first, None, keep_weights)


def _digest(corpus: Corpus) -> str:
    assert isinstance(corpus.train, bytes)  # Study refuses tokens of a file
    assert isinstance(corpus.validation, bytes)
    return digest(corpus.train, corpus.validation)


def work_far(
    topic: str, job: Sequence[Run], keep_weights: bool, corpus: Corpus | None
) -> tuple[list[Record], dict[str, bytes]]:
    """The records of a job, and the files of weights that are to be kept."""
    desk = _Post(topic, job[0], keep_weights)

    def text() -> Corpus:
        assert corpus is not None  # the study has sent it, for there is a run of text
        return corpus

    return work_at(desk, job, text, None), desk.weights


class _Post(Desk):
    """Messages to the study's process in place of files."""

    def __init__(self, topic: str, first: Run, keep_weights: bool) -> None:
        from distributed import get_worker

        self._worker = get_worker()
        self._key = self._worker.get_current_task()
        self._topic, self._first, self._keep = topic, first, keep_weights
        self._last = 0.0
        self.weights: dict[str, bytes] = {}
        self.checkpoint = Checkpoint(None, "")

    def report(self, done: int, step: int, values: Mapping[str, float]) -> None:
        task = self._worker.state.tasks.get(self._key)
        if task is None or task.state == "cancelled":
            raise RuntimeError("the study has ended")
        if time.monotonic() - self._last > _PAUSE:
            self._last = time.monotonic()
            self._send(progress_name(self._first), progress_text(done, step, values))

    def keep(self, run: Run, model: Trainer) -> None:
        if self._keep:
            self.weights[weights.file_name(run)] = weights.dump(run, model.state())

    def save(self, run: Run, record: Record) -> None:
        self._send(run.file_name(), json.dumps(record))

    def leave(self) -> None:
        pass

    def _send(self, name: str, text: str) -> None:
        self._worker.log_event(self._topic, (name, text))
