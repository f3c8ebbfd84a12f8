"""Time, memory and errors of every variant, at every length, interleaved. Knows no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness.clock import Budget, Sample, interleave, summary
from harness.correctness import Row
from harness.exact import Expected
from harness.record import fault, first_line
from harness.run import KINDS, PARAM, STEP, Ready, Runner
from harness.variants import Inputs, Variant


@dataclass(frozen=True)
class Settings:
    """Sizes and limits of the measurement.

    Attributes
    ----------
    rounds
        Minimum and maximum.
    slowest
        Milliseconds; variants that would take longer are not run.
    seed
        Of the inputs.
    """

    dtype: str
    heads: int
    dim: int
    lengths: tuple[int, ...]
    rounds: tuple[int, int] = (3, 30)
    slowest: float = 4000.0
    seed: int = 0


@dataclass
class Entry:
    """A variant at one length: its work by kind of pass, its record, milliseconds of samples."""

    variant: Variant
    row: Row
    work: dict[str, Ready] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)


class Timing:
    """Times all variants at all lengths on one framework."""

    def __init__(
        self, runner: Runner, settings: Settings, variants: Sequence[Variant], budget: Budget
    ) -> None:
        self._runner, self._settings, self._variants = runner, settings, variants
        self._budget = budget
        self._slow: dict[str, tuple[int, float]] = {}  # longest length so far, and its milliseconds
        self._uncompiled: dict[str, str] = {}  # name of a variant -> reason

    def rows(self, on_part: Callable[[list[Row]], None] = lambda rows: None) -> Iterator[Row]:
        """One record per variant and length.

        ``on_part`` gets the unfinished records of a length at its beginning, after each first call
        and after each round.
        """
        self._warm()
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
        a_round = 1e-3 * sum(e.first[kind] for e in entries for kind in e.work)
        left, (least, most) = self._budget.left() - end, settings.rounds
        rounds = min(most, max(least, int(left / (a_round or 1.0))))

        def on_round(taken: Mapping[Any, list[Sample]]) -> None:
            for (n, _), samples in taken.items():
                entries[n].row |= summary(samples)
            tell()

        # Overrun by half, rather than run fewer rounds than needed.
        interleave(runs, rounds, Budget(1.5 * left), seed=length, on_round=on_round)
        self._runner.release()
        return rows

    def _inputs(self, length: int) -> Inputs:
        at = self._settings
        return Inputs(self._runner, at.heads, length, at.dim, at.dtype, at.seed + length)

    def _warm(self) -> None:
        """Compile what is compiled for any length, in half of the time."""
        until, longest = self._budget.left() / 2, 0.0
        for variant in self._variants if self._runner.warm_lengths else ():
            if not variant.compiles:
                continue
            before = self._budget.left()
            reason = self._budget.refuses(until + longest, compiles=1)
            if reason is not None:
                self._uncompiled[variant.name] = reason
                continue
            self._budget.compiles -= 1
            for length in self._runner.warm_lengths:
                entry = Entry(variant, {"status": ""})
                for ready in self._begun(entry, self._inputs(length)):
                    self._attempt(entry, ready)
                if entry.row["status"]:  # it fails again when measured, and is reported there
                    break
            longest = max(longest, before - self._budget.left())

    def _attempt(self, entry: Entry, ready: Ready) -> None:
        try:
            ready()
        except Exception as error:
            self._fault(entry, error)

    def _begin(
        self, entries: Sequence[Entry], inputs: Inputs, end: float, on_first: Callable[[], None]
    ) -> None:
        """Compile, make the first calls and check their results; ``on_first()`` after each."""
        runner, expected = self._runner, Expected(inputs)
        with ThreadPoolExecutor(runner.workers) as pool:
            for at in range(0, len(entries), runner.workers):
                begun = []
                for entry in entries[at : at + runner.workers]:
                    programs = len(_kinds(entry.variant)) if runner.compiles else 0
                    why = self._uncompiled.get(entry.variant.name) or self._refusal(end, programs)
                    entry.row["reason"] = why or entry.row["reason"]
                    if entry.row["reason"] is None:
                        begun += [
                            (entry, ready, pool.submit(ready.compile))
                            for ready in self._begun(entry, inputs)
                        ]
                while begun:  # pop: a program frees its memory before the next one runs
                    self._first(*begun.pop(0), expected)
                    on_first()

    def _begun(self, entry: Entry, inputs: Inputs) -> Iterator[Ready]:
        """The passes of a variant, still to be compiled; none after a fault."""
        variant = entry.variant
        try:
            function, held = variant.ready(inputs)
            params = inputs.params(variant.scheme)
            learned = [*inputs.tokens, *(params if variant.learns else ())]
            arrays = {**inputs.tokens, **params, **held}
            for kind in _kinds(variant):
                ready = self._runner.ready(
                    function, arrays, kind, learned=learned, d_out=lambda _: [inputs.d_out]
                )
                self._budget.compiles -= int(self._runner.compiles)  # what is refused costs none
                yield ready
        except Exception as error:
            self._fault(entry, error)

    def _first(
        self, entry: Entry, ready: Ready, compiling: Future[None], expected: Expected
    ) -> None:
        """First calls of a pass, checked."""
        row, kind, runner = entry.row, ready.kind, self._runner
        try:
            compiling.result()
            row |= {f"seconds to {what} {kind}": s for what, s in ready.seconds.items()}
            if runner.compiles:
                used = row[f"bytes of {kind}"] = ready.peak_memory()
                if used is not None and used > 0.95 * runner.free():
                    raise NotImplementedError(
                        f"it takes {used / 2**30:.1f} GiB, {runner.free() / 2**30:.1f} are free"
                    )
            answers, again = _answers(ready), _answers(ready)
            row[f"{kind} repeats"] = all(
                bool(runner.xp().all(again[name] == a)) for name, a in answers.items()
            )
            del again
            errors = expected.errors(entry.variant.scheme, answers)
            row["errors"] = row.get("errors", {}) | errors
            del answers
            entry.first[kind], notes = ready.first()
            row |= notes
            entry.work[kind] = ready
        except Exception as error:
            self._fault(entry, error)

    def _sample(self, entry: Entry, kind: str) -> Sample:
        """Milliseconds of one run, by stage."""
        return entry.work[kind].sample()

    def _impossible(self, variant: Variant, length: int) -> str | None:
        """Why a variant does not run at a length, such as too slow; None if it does."""
        if variant.lengths and length not in variant.lengths:
            return f"measured only at {', '.join(map(str, variant.lengths))}"
        if variant.name in self._slow:
            before, ms = self._slow[variant.name]
            if ms * (length / before) ** 2 > self._settings.slowest:
                return f"it took {ms:.0f} ms at length {before}"
        needs = variant.bytes_per_pair * self._settings.heads * length**2
        if variant.dense and needs > 0.7 * self._runner.free():
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
            status = "refused" if self._runner.out_of_memory(error) else "failed"
            entry.row |= {"status": status, **fault(error)}
            self._runner.check()

    def _run(self, entry: Entry, kind: str) -> Sample:
        try:
            return self._sample(entry, kind)
        except Exception as error:  # such as memory that other variants now hold
            entry.row |= {"status": "failed", **fault(error)}
            self._runner.check()
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


def _kinds(variant: Variant) -> tuple[str, ...]:
    return (STEP,) if variant.learns else KINDS


def _answers(ready: Ready) -> dict[str, Any]:
    """The result of a forward pass; the result and all gradients of a step."""
    (out,), gradients = ready.answers()
    if ready.kind != STEP:
        return {"out": out}
    return {"out of step": out, **{n.removeprefix(PARAM): a for n, a in gradients.items()}}


def _is_right(error: dict[str, float | None]) -> bool:
    relative, allowed = error["relative"], error["allowed"]
    return relative is not None and allowed is not None and relative <= allowed
