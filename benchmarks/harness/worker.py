"""A process that makes the guarded calls with one commit's sources, as ``gate.py`` asks.

Questions come as lines of JSON, and each gets one line back. The caller's ``PYTHONPATH`` says whose
sources.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from guarded import GUARDED

from harness.clock import mean


def main() -> None:
    """Answer until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a benchmark prints is no answer
    runs: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        name, calls = asked["name"], asked["calls"]
        try:
            if name not in runs:
                runs[name] = GUARDED[name]()
                runs[name]()
            with flushing(asked.get("flush", False)):
                answer = {"seconds": seconds(runs[name], calls)} if calls else counts(runs[name])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


@contextmanager
def flushing(flush: bool) -> Iterator[None]:
    """With ``flush``, PyTorch takes subnormal numbers for 0; others have no such switch."""
    torch = sys.modules.get("torch") if flush else None
    if torch is None:
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def seconds(run: Callable[[], Any], calls: int) -> float:
    """Processor time of some calls, of all threads and of child processes."""
    return 1e-3 * calls * mean(run, calls, _clock)


def _clock() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def counts(run: Callable[[], Any]) -> dict[str, int | None]:
    """What one call counts up to, by kind; None where two calls differ."""
    first, second = _counts(run), _counts(run)
    return {kind: first[kind] if first[kind] == second[kind] else None for kind in first}


def _counts(run: Callable[[], Any]) -> dict[str, int]:
    own: dict[str, int] = getattr(run, "counts", dict)()
    if own:
        return own
    found = {"Python calls": _python_calls(run)}
    if "torch" in sys.modules:
        found["PyTorch operations"] = _torch_operations(run)
    return found


def _python_calls(run: Callable[[], Any]) -> int:
    count = 0

    def saw(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(saw)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def _torch_operations(run: Callable[[], Any]) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return operation(*args, **(kwargs or {}))

    with Counting() as counting:
        run()
    return counting.count


if __name__ == "__main__":
    main()
