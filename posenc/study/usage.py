"""What a training uses: tokens per second, and memory."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from posenc.study.trainer import load_trainer

if TYPE_CHECKING:
    from posenc.study.run import Run


class Usage:
    """Tokens per second since the last report of a training, and its process's memory."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last, self._step = time.perf_counter(), 0

    def since_last(self, step: int) -> dict[str, float]:
        """``tokens_per_second`` since the last call, and ``memory``.

        The first value includes compilation. After an interruption, a step that was trained before
        counts as well, in that value alone.
        """
        now, run = time.perf_counter(), self._run
        recipe = run if step <= run.steps else run.finetuning()
        steps = step - self._step if step > self._step else 0  # the next run of a job tunes anew
        speed = steps * recipe.batch_size * recipe.train_tokens / max(now - self._last, 1e-9)
        self._last, self._step = now, step
        return {"tokens_per_second": speed, "memory": float(memory(run.backend))}


def memory(backend: str) -> int:
    """The most bytes that this process has used: on an accelerator those of the device.

    0 where the system does not tell.
    """
    own = getattr(load_trainer(backend), "device_memory", None)
    return (own() if own is not None else 0) or _resident()


def _resident() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest
