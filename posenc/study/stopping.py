"""SIGTERM ends a command as Ctrl-C does: what is finished is kept, workers leave."""

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
        yield  # only the main thread hears signals
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of a few quick steps."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, frame: heard.append(number)) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler or signal.SIG_DFL)
        for number in heard:
            signal.raise_signal(number)


def exit_status(stop: KeyboardInterrupt) -> int:
    """As a shell gives it: 128 and the number of the signal, 130 for Ctrl-C and 143."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
