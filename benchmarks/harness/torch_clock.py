"""Time and memory of PyTorch: events and an allocator on a GPU, a clock on a CPU."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from harness.clock import Sample

Stage = tuple[str, Callable[[Any], Any]]
_SCRATCH = 2**28  # bytes; caches hold less
_CYCLES = 2_000_000  # a millisecond, about
_CALLS, _QUEUED = 20, 100.0  # calls queued at once, and milliseconds that they may take


class Clock:
    """Times stages of work; each stage receives the result of the one before.

    On a GPU the caches are flushed first. Then the device waits until all work is queued, so the
    times are those of the device alone. ``host`` is the time that the host needs to queue the work;
    if it is longer, eager execution is limited by the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._scratch = torch.zeros(_SCRATCH // 4 if self._gpu else 1, device=device)
        self._sum = torch.zeros((), device=device)

    def run(self, stages: Sequence[Stage], ahead: float = 0.0, watched: bool = False) -> Sample:
        """Milliseconds by stage, and of the host; the device first waits ``ahead`` milliseconds.

        ``watched``: PyTorch warns of every operation that makes the host wait.
        """
        if self._gpu:
            # Read, not written: what is written goes to memory while the work is timed.
            torch.sum(self._scratch, dim=0, out=self._sum)
            if ahead > 0:
                torch.cuda._sleep(int(ahead * _CYCLES))
        marks, result = [self._mark()], None
        begun = time.perf_counter()
        with self._watch() if watched else nullcontext():
            for _, stage in stages:
                result = stage(result)
                marks.append(self._mark())
        host = 1e3 * (time.perf_counter() - begun)
        del result
        self._wait()
        times = [self._between(*pair) for pair in pairwise(marks)]
        return {name: ms for (name, _), ms in zip(stages, times, strict=True)} | {"host": host}

    def first(self, stages: Sequence[Stage]) -> tuple[Sample, int | None, bool | None]:
        """A run, its peak of newly allocated bytes, and whether the host waited for the device.

        The last two are None on a CPU.
        """
        if not self._gpu:
            return self.run(stages), None, None
        samples: list[Sample] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            used = self.peak(lambda: samples.append(self.run(stages, watched=True)))
        waits = any("synchronizing CUDA operation" in str(w.message) for w in caught)
        return samples[0], used, waits

    def peak(self, call: Callable[[], Any]) -> int:
        """Most bytes that a call allocates on the GPU."""
        self._wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self._wait()
        return torch.cuda.max_memory_allocated() - before

    def wall(self, stages: Sequence[Stage], ms: float) -> float | None:
        """Milliseconds per call, up to 20 of them queued one after another and waited for once.

        More than the time of the device means that the device waits for the host. None for calls
        of over 100 ms, which no host is too slow for; ``ms`` is about how long one takes.
        """
        if ms > _QUEUED:
            return None
        calls, result = min(_CALLS, int(_QUEUED / max(ms, 1e-3))), None
        self._wait()
        begun = time.perf_counter()
        for _ in range(calls):
            for _, stage in stages:
                result = stage(result)
        self._wait()
        return float(f"{1e3 * (time.perf_counter() - begun) / calls:.6g}")

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    @contextmanager
    def _watch(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def _mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) if self._gpu else 1e3 * (last - first)
