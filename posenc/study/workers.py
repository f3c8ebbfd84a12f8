"""Processes that train: single-threaded, and gone when the study is, however it ended."""

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


@contextmanager
def processes(count: int, scratch: Path) -> Iterator[Executor]:
    """A pool of ``count`` workers; on the way out they leave, whatever they were doing.

    Each waits in a thread for the end of a pipe, which is there when this process closes it or is
    no more, killed or not: the queue of a pool has no end, since workers hold both of its sides.
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
    """Until they have left; one that does not is killed."""
    left, end = {process.sentinel: process for process in leaving}, time.monotonic() + 2 * _PATIENCE
    while left and (seconds := end - time.monotonic()) > 0:
        for sentinel in wait(list(left), seconds):
            del left[sentinel]  # type: ignore[arg-type]
    for process in left.values():
        process.kill()


@contextmanager
def compiled_programs() -> Iterator[Path]:
    """A new folder, this user's alone, that workers share compiled programs in; then removed.

    Never one that was there before: what lies in it is native code, loaded by name.
    """
    folder = Path(tempfile.mkdtemp(prefix="posenc-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _begin(parent: Connection, scratch: str) -> None:
    """Two workers of one thread are faster than one of two, and their results do not vary."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
        os.environ[name] = "1"
    threading.Thread(target=_leave_with, args=(parent, scratch), daemon=True).start()


def _leave_with(parent: Connection, scratch: str) -> None:
    with suppress(EOFError, OSError):
        parent.recv()  # nothing is ever sent
    WRITING.acquire(timeout=_PATIENCE)  # a record that is begun is written to its end
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)
