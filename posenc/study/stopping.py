"""SIGTERM ends a command as Ctrl-C does: finished runs are kept, and workers leave."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """A SIGTERM, caught wherever Ctrl-C is."""


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """Raise ``Terminated`` at a SIGTERM; a second one does not disturb the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until a few quick steps are done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, frame: pending.append(number)) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler or signal.SIG_DFL)
        for number in pending:
            signal.raise_signal(number)


def exit_status(stop: KeyboardInterrupt) -> int:
    """128 plus the number of the signal, as a shell returns it: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
