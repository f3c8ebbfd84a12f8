"""Whether a commit is slower than another one, by numbers that mean something on a noisy machine.

``python benchmarks/gate.py BASE`` compares the sources as they are with those of ``BASE``, a commit
or a branch, and ends with 1 if a guarded call (``guarded.py``) became slower. Two kinds of numbers
decide:

- Ratios of processor time. A pair is two fresh processes, one with the sources of each side, that
  take turns of some milliseconds. So other work on the machine slows both alike. A pair's ratio is
  the median over its turns. A call is slower if the median of several pairs is above ``--slower``,
  and that of new pairs too.
- Counts of what does not vary: Python calls and PyTorch operations of a call, instructions of a
  program that XLA compiled. A call is slower if one of them grew by more than ``--more``.

Subnormal numbers cost nothing on some processors and a hundredfold on others. So it names the
processor, and the calls that are more than ``--slower`` times as fast where they are taken for 0.

``--same N`` compares ``BASE`` with itself N times, and prints how often that gives a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from guarded import GUARDED  # noqa: E402
from harness import record  # noqa: E402
from harness.sources import ROOT, checkout, git  # noqa: E402

_TURN = 0.03  # seconds of a turn, if a call is shorter
_FLUSHED = 5  # pairs of turns with and without subnormal numbers
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NPROC": "1",
    "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0",
}  # fmt: skip


class Worker:
    """A process with the sources of one side."""

    def __init__(self, tree: Path) -> None:
        path = os.pathsep.join([str(tree), str(tree / "backends")])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "harness" / "worker.py")],
            env=os.environ | _ONE_THREAD | {"PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree,
        )  # fmt: skip

    def ask(self, name: str, calls: int = 0, *, flush: bool = False) -> dict[str, Any]:
        """Seconds of some calls; the counts of one, if ``calls`` is 0.

        With ``flush``, subnormal numbers are 0.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, "calls": calls, "flush": flush}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the process that measures {name} died, with exit code {self.end()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> int:
        """Close its input and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()


@dataclass
class Guarded:
    """What is known of one guarded call.

    Attributes
    ----------
    ratios
        Time with the new sources divided by that with the old ones, of every pair.
    again
        The same of the second measurement; empty if there was none.
    counts
        Kind -> counts with the old and the new sources; those that vary are left out.
    subnormal
        Time with the new sources divided by that where subnormal numbers are 0.
    why_not
        Why it was not compared.
    """

    ratios: list[float]
    again: list[float]
    counts: dict[str, tuple[int, int]]
    subnormal: float = 1.0
    why_not: str | None = None

    def is_slower(self, slower: float) -> bool:
        """Whether the median ratio is above ``slower``, in every measurement."""
        medians = [statistics.median(some) for some in (self.ratios, self.again) if some]
        return bool(medians) and min(medians) > slower

    def has_more(self, more: float) -> bool:
        """Whether a count grew by more than ``more`` times."""
        return any(new > more * old for old, new in self.counts.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if something became slower."""
    options = _options(arguments)
    names = [name for name in GUARDED if re.search(options.only, name)]
    if not names:
        sys.exit(f"--only {options.only!r} matches none of {', '.join(GUARDED)}")
    with ExitStack() as stack:
        old = stack.enter_context(_sources(options.base))
        if options.same:
            return _false_alarms(old, names, options)
        new = ROOT if options.head is None else stack.enter_context(_sources(options.head))
        found = _compare(old, new, names, options)
    print(f"on {record.processor()}\n\n{_table(found, options)}")
    return int(any(_alarm(one, options) for one in found.values()))


def _false_alarms(tree: Path, names: Sequence[str], options: argparse.Namespace) -> int:
    """Compare sources with themselves, again and again."""
    alarms, ratios = 0, []
    for n in range(options.same):
        found = _compare(tree, tree, names, options)
        false = [name for name, one in found.items() if _alarm(one, options)]
        alarms += len(false)
        ratios += [statistics.median(one.ratios) for one in found.values() if one.ratios]
        print(f"{n + 1} of {options.same}: {', '.join(false) or 'no false alarm'}", flush=True)
    above = sum(ratio > options.slower for ratio in ratios)
    print(
        f"{alarms} false alarms in {len(ratios)} comparisons of the same sources; first "
        f"measurements above {options.slower:g}: {above}; ratios from {min(ratios):.3f} to "
        f"{max(ratios):.3f}, half of them within {_half(ratios):.3f} of 1"
    )
    return 0


def _half(ratios: Sequence[float]) -> float:
    return statistics.median(abs(ratio - 1) for ratio in ratios)


def _compare(
    old: Path, new: Path, names: Sequence[str], options: argparse.Namespace
) -> dict[str, Guarded]:
    found = {name: Guarded([], [], {}) for name in names}
    for n in range(options.pairs):
        _pair(old, new, found, options.turns, with_counts=n == 0)
    suspects = {name: one for name, one in found.items() if one.is_slower(options.slower)}
    for one in suspects.values():
        one.ratios, one.again = [], one.ratios
    for _ in range(options.pairs if suspects else 0):
        _pair(old, new, suspects, options.turns)
    for one in suspects.values():
        one.ratios, one.again = one.again, one.ratios
    return found


def _pair(
    old: Path, new: Path, found: Mapping[str, Guarded], turns: int, *, with_counts: bool = False
) -> None:
    """Add the ratio of one pair of processes to every guarded call."""
    sides = Worker(old), Worker(new)
    for name, one in found.items():
        before, after = (side.ask(name) for side in sides)
        for side, answer in zip(("old", "new"), (before, after), strict=True):
            if "error" in answer:
                one.why_not = f"{side} sources: {answer['error']}"
        if one.why_not is not None:
            continue
        if with_counts:
            one.counts = {
                kind: (before[kind], after[kind])
                for kind in before
                if before[kind] is not None and after.get(kind) is not None
            }
        once = sides[0].ask(name, 1)["seconds"]
        calls = max(1, round(_TURN / max(once, 1e-5)))
        ratios = []
        for turn in range(turns):
            order = sides if turn % 2 else sides[::-1]
            seconds = {side: side.ask(name, calls)["seconds"] for side in order}
            ratios.append(seconds[sides[1]] / seconds[sides[0]])
        one.ratios.append(statistics.median(ratios))
        if with_counts:
            one.subnormal = _subnormal(sides[1], name, calls)
    for side in sides:
        side.end()


def _subnormal(side: Worker, name: str, calls: int) -> float:
    """Time of a call divided by that where subnormal numbers are 0."""
    ratios: list[float] = []
    for _ in range(_FLUSHED):
        plain, flushed = (side.ask(name, calls, flush=f)["seconds"] for f in (False, True))
        ratios.append(plain / flushed)
    return statistics.median(ratios)


def _alarm(one: Guarded, options: argparse.Namespace) -> bool:
    return one.is_slower(options.slower) or one.has_more(options.more)


def _table(found: Mapping[str, Guarded], options: argparse.Namespace) -> str:
    rows = [
        [
            name,
            f"{statistics.median(one.ratios):.3f}" if one.ratios else None,
            f"{min(one.ratios):.3f} .. {max(one.ratios):.3f}" if one.ratios else None,
            f"{statistics.median(one.again):.3f}" if one.again else None,
            "; ".join(f"{old} -> {new} {kind}" for kind, (old, new) in one.counts.items()),
            one.why_not or ("SLOWER" if _alarm(one, options) else "ok") + _trap(one, options),
        ]
        for name, one in found.items()
    ]
    head = ["call", "new / old time", "of all pairs", "again", "counts of one call", ""]
    return record.table(head, rows)


def _trap(one: Guarded, options: argparse.Namespace) -> str:
    high = one.subnormal > options.slower
    return f"; {one.subnormal:.2f} of the time without subnormal numbers" if high else ""


@contextmanager
def _sources(revision: str) -> Iterator[Path]:
    """A folder with the library as it is in a commit."""
    try:
        commit = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        sys.exit(f"BASE and --head must be commits or branches of this clone, got {revision!r}")
    with checkout(commit) as folder:
        yield folder


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("base", metavar="BASE", help="the commit or branch to compare with")
    add("--head", metavar="COMMIT", help="the new sources; default: as they are in this folder")
    add("--only", metavar="REGEX", default="", help="only guarded calls with such a name")
    add("--pairs", type=_count, default=5, help="pairs of processes")
    add("--turns", type=_count, default=15, help="turns of a pair")
    add("--slower", type=float, default=1.1, help="ratio of times from which a call is slower")
    add("--more", type=float, default=1.05, help="ratio of counts from which a call is slower")
    add("--same", type=_count, metavar="N", help="compare BASE with itself N times")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
