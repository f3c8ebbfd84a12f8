"""Time, memory and errors of every variant, at every length, interleaved. Knows no framework."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import posenc
from harness.clock import Budget, Sample, interleave, summary
from harness.correctness import Row
from harness.record import fault, finite, first_line
from posenc.contract.protocol import PositionScheme
from posenc.testing import Host
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR

_OF_TOKENS = ("out", "out of step", "q", "k", "v")  # arrays with a row per token
DENSE = ("sdpa", "xla", "reference")  # implementations that hold the whole bias


def schemes(heads: int) -> dict[str, PositionScheme]:
    """Schemes that are measured; ``none`` is attention without positions."""
    return {
        "none": posenc.NoPE(),
        "alibi": posenc.ALiBi(heads),
        "slopes": posenc.ALiBi(heads, learned=True),
        "t5": posenc.T5Bias(heads, causal=True),
    }


def first_params(name: str, scheme: PositionScheme) -> dict[str, Host]:
    """Initial params; those of T5 are scaled to the size of trained ones."""
    larger = 25 if name == "t5" else 1
    return {n: np.float32(a * larger) for n, a in posenc.init_params(scheme, 0).items()}


def name_of(
    scheme: str, implementation: str, learns: bool = False, skip: bool | None = None
) -> str:
    """Name of a variant of this library."""
    every = ", all blocks" if skip is False else ""
    return f"{scheme} {implementation}{every}{', learned' if learns and scheme != 'slopes' else ''}"


@dataclass(frozen=True)
class Variant:
    """One way to compute attention.

    Attributes
    ----------
    name
        Begins with the scheme.
    ready
        Makes the call from the framework's inputs; does everything that a user does only once.
    role
        ``"ours"``: of this library. ``"baseline"``: what goals compare with. ``"peer"``: of another
        library. ``"trial"``: only for comparison with another trial.
    dense, compiles
        Whether it holds a number per pair, compiles on the first call.
    bytes_per_pair
        Memory per pair, if it is dense.
    learns
        Whether it has gradients of params. Then only a step is measured: the forward pass is the
        same as without them.
    exact
        Whether its results must be right; otherwise it is a yardstick of speed.
    lengths
        Sequence lengths at which it is measured; empty: all.
    """

    name: str
    ready: Callable[..., Any] = field(repr=False)
    role: str = "baseline"
    dense: bool = False
    bytes_per_pair: int = 20
    compiles: bool = False
    learns: bool = False
    exact: bool = True
    lengths: tuple[int, ...] = ()

    @property
    def scheme(self) -> str:
        """Its key in ``schemes``."""
        return self.name.split()[0]


@dataclass(frozen=True)
class Settings:
    """Sizes and limits of the measurement.

    Attributes
    ----------
    rounds
        Minimum and maximum.
    slowest
        Milliseconds; variants that would take longer are not run.
    """

    device: str
    dtype: str
    heads: int
    dim: int
    lengths: tuple[int, ...]
    rounds: tuple[int, int] = (3, 30)
    slowest: float = 4000.0


@dataclass
class Entry:
    """A variant at one length: its work by kind of pass, its record and its first samples."""

    variant: Variant
    row: Row
    work: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Sample] = field(default_factory=dict)


class Timing(ABC):
    """Times all variants at all lengths; subclasses make, start and run them in a framework."""

    def __init__(self, settings: Settings, variants: Sequence[Variant], budget: Budget) -> None:
        self._settings, self._variants, self._budget = settings, variants, budget
        self._slow: dict[str, tuple[int, float]] = {}  # longest length so far, and its milliseconds

    @abstractmethod
    def _inputs(self, length: int) -> Any:
        """Random inputs of this length."""

    @abstractmethod
    def _begin(
        self, entries: Sequence[Entry], inputs: Any, end: float, on_first: Callable[[], None]
    ) -> None:
        """First calls of the entries that can run; they fill ``work`` and ``first``.

        ``on_first()`` after each of them.
        """

    @abstractmethod
    def _sample(self, entry: Entry, kind: str) -> Sample:
        """Milliseconds of one run, by stage."""

    @abstractmethod
    def _expects(self, error: Exception) -> bool:
        """Whether an error means that a variant cannot serve the call; others are faults."""

    @abstractmethod
    def _check_device(self) -> None:
        """Raise if the device computes nothing any more, as after an illegal address."""

    @abstractmethod
    def _free(self) -> float:
        """Bytes of free memory."""

    def rows(self, on_part: Callable[[list[Row]], None] = lambda rows: None) -> Iterator[Row]:
        """One record per variant and length.

        ``on_part`` gets the unfinished records of a length at its beginning, after each first call
        and after each round.
        """
        lengths = self._settings.lengths
        work = [
            sum(not v.lengths or length in v.lengths for v in self._variants) for length in lengths
        ]
        for number, length in enumerate(lengths):
            share = self._budget.left() * work[number] / sum(work[number:])
            yield from self._at(length, share, on_part)

    def _at(self, length: int, share: float, on_part: Callable[[list[Row]], None]) -> list[Row]:
        settings, end = self._settings, self._budget.left() - share
        sizes = {"length": length, "heads": settings.heads, "dim": settings.dim}
        entries = [
            Entry(v, {"variant": v.name, "role": v.role, "exact": v.exact, "status": "not run"})
            for v in self._variants
        ]
        rows = [entry.row for entry in entries]
        for entry in entries:
            entry.row |= sizes | {"reason": self._impossible(entry.variant, length)}

        def tell() -> None:
            for entry in entries:
                self._judge(entry, length)
            on_part(rows)

        tell()
        self._begin(entries, self._inputs(length), end, tell)
        runs = {
            (n, kind): partial(self._run, entry, kind)
            for n, entry in enumerate(entries)
            for kind in entry.work
        }
        a_round = 1e-3 * sum(sum(e.first[kind].values()) for e in entries for kind in e.work)
        left, (least, most) = self._budget.left() - end, settings.rounds
        rounds = min(most, max(least, int(left / (a_round or 1.0))))

        def on_round(taken: Mapping[Any, list[Sample]]) -> None:
            for (n, _), samples in taken.items():
                entries[n].row |= summary(samples)
            tell()

        # Overrun by half, rather than run fewer rounds than needed.
        interleave(runs, rounds, Budget(1.5 * left), seed=length, on_round=on_round)
        return rows

    def _impossible(self, variant: Variant, length: int) -> str | None:
        """Why a variant does not run at a length, such as too slow; None if it does."""
        if variant.lengths and length not in variant.lengths:
            return f"measured only at {', '.join(map(str, variant.lengths))}"
        if variant.name in self._slow:
            before, ms = self._slow[variant.name]
            if ms * (length / before) ** 2 > self._settings.slowest:
                return f"it took {ms:.0f} ms at length {before}"
        needs = variant.bytes_per_pair * self._settings.heads * length**2
        if variant.dense and needs > 0.7 * self._free():
            return f"a dense bias takes about {needs / 2**30:.0f} GiB"
        return None

    def _refusal(self, end: float, compiles: int = 0) -> str | None:
        """Why no more work starts at a length that must end when ``end`` seconds are left."""
        return self._budget.refuses(max(0.0, end), compiles)

    def _fault(self, entry: Entry, error: Exception) -> None:
        """Record an error: a variant may fail in any way, and that is a result."""
        if isinstance(error, NotImplementedError):
            entry.row |= {"status": "refused", "reason": first_line(error)}
        else:
            status = "refused" if self._expects(error) else "failed"
            entry.row |= {"status": status, **fault(error)}
            self._check_device()

    def _run(self, entry: Entry, kind: str) -> Sample:
        try:
            return self._sample(entry, kind)
        except Exception as error:  # such as memory that other variants now hold
            entry.row |= {"status": "failed", **fault(error)}
            self._check_device()
            return {}

    def _judge(self, entry: Entry, length: int) -> None:
        """Whether results are right, and rates, of what was measured so far."""
        row, settings = entry.row, self._settings
        if entry.variant.exact and "errors" in row:
            row["right"] = all(map(_is_right, row["errors"].values()))
        if "forward" not in row and "step" not in row:
            return
        if row["status"] == "not run":  # a refused or failed step keeps its status
            row["status"] = "measured"
        pairs = length * (length + 1) / 2
        flops = 4 * settings.heads * settings.dim * pairs
        for stage, products in {"forward": 1, "backward": 2.5, "step": 3.5}.items():
            if stage in row:
                rate = products * flops / row[stage]["median"] * 1e-9
                row[f"TFLOP/s of {stage}"] = float(f"{rate:.4g}")
        slowest = max(row[stage]["median"] for stage in ("forward", "step") if stage in row)
        self._slow[entry.variant.name] = length, slowest


def error_of(name: str, relative: float, dtype: str) -> dict[str, float | None]:
    """An error as it is recorded, and the largest that is right.

    Half precision rounds params' gradients as often as others, but many more numbers are summed.
    """
    factor = 1 if name in _OF_TOKENS else REDUCTION_FACTOR
    allowed = float(f"{factor * ATTENTION_TOL[dtype]:.3g}")
    return {"relative": finite(relative), "allowed": allowed}


def _is_right(error: dict[str, float | None]) -> bool:
    relative, allowed = error["relative"], error["allowed"]
    return relative is not None and allowed is not None and relative <= allowed


def rates(size: int, product: float, copied: int, copy: float) -> dict[str, float]:
    """Rates from milliseconds: of a product of square matrices, and of a copy of so many bytes."""
    tera, giga = 2e-9 * size**3 / product, 2e-6 * copied / copy
    return {
        "product, TFLOP/s": float(f"{tera:.3g}"),
        "copy, GB/s read and written": float(f"{giga:.3g}"),
    }


def free_memory() -> int:
    """Free bytes of the system."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
