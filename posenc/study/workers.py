"""Worker processes: single-threaded, and gone when the study is, however it ended."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from posenc.study.results import WRITING

_PATIENCE = 10.0  # seconds for a record that is being written


class LostPoolError(ConnectionError):
    """The workers cannot be reached any more, none of them."""


@contextmanager
def worker_pool(count: int, scratch: Path) -> Iterator[Executor]:
    """A pool of ``count`` processes; on the way out they leave, whatever they were doing.

    In each process a thread waits for the end of a pipe. The pipe ends when this process closes it
    or dies, even if killed. The queue of the pool cannot tell: workers hold both of its ends.
    """
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    parent, here = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=_begin, initargs=(parent, str(scratch))
    )
    try:
        yield pool
        pool.shutdown()
    finally:
        here.close()
        parent.close()
        _wait_for(set(multiprocessing.active_children()) - others)
        pool.shutdown()


def _wait_for(leaving: Iterable[BaseProcess]) -> None:
    """Wait until the processes have left; kill one that does not leave."""
    remaining, end = (
        {process.sentinel: process for process in leaving},
        time.monotonic() + 2 * _PATIENCE,
    )
    while remaining and (seconds := end - time.monotonic()) > 0:
        for sentinel in wait(list(remaining), seconds):
            del remaining[sentinel]  # type: ignore[arg-type]  # wait() returns what it was given
    for process in remaining.values():
        process.kill()


@contextmanager
def compile_cache() -> Iterator[Path]:
    """A new folder, this user's alone, where workers share compiled programs; removed at the end.

    Never an existing folder: the files in it are native code, loaded by name. One that outlives the
    study would be kept apart by version, processor and owner, and JAX leaves a half-written program
    in it when a process is killed.
    """
    folder = Path(tempfile.mkdtemp(prefix="posenc-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def one_thread() -> None:
    """Let what this process imports from now on compute with one thread."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
        os.environ[name] = "1"


def _begin(parent: Connection, scratch: str) -> None:
    """Limit a worker to one thread, and let it leave with its parent.

    Two workers of one thread are faster than one of two, and their results do not vary.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    one_thread()
    threading.Thread(target=_leave_with, args=(parent, scratch), daemon=True).start()


def _leave_with(parent: Connection, scratch: str) -> None:
    with suppress(EOFError, OSError):
        parent.recv()  # nothing is ever sent
    WRITING.acquire(timeout=_PATIENCE)  # a record that is begun is written to its end
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)
