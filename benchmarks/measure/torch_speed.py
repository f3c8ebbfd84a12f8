"""Time, memory and errors of every variant, at every length, by turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import posenc_torch
from measure.clock import Budget, Sample, alternate, summary
from measure.right import Row, apart, said
from measure.torch_clock import (
    Clock,
    Stage,
    forward_stages,
    in_training,
    of_forward,
    training_stages,
)
from measure.torch_variants import Inputs, Variant
from posenc.testing.tolerances import PATHS

# Two small calls that differ in length: kernels are then compiled for any. One example, since to
# the compiler 1 is a number of its own.
_WARM = ((1, 256), (1, 384))
_SHOWN = 16  # rows of queries whose results and gradients are compared
_HELD = 20  # bytes for each pair, with a dense bias


@dataclass(frozen=True)
class Settings:
    """Sizes, and how long it may take.

    Attributes
    ----------
    tokens
        In a call: the batch is ``tokens // length``, and at least 1.
    rounds
        At least and at most.
    slowest
        Milliseconds: what would take longer is not run.
    """

    device: str
    dtype: str
    heads: int
    dim: int
    tokens: int
    lengths: tuple[int, ...]
    rounds: tuple[int, int] = (3, 30)
    slowest: float = 4000.0

    def batch(self, length: int) -> int:
        """Sequences in a call."""
        return max(1, self.tokens // length)

    def inputs(self, batch: int, length: int) -> Inputs:
        """New ones."""
        dtype = getattr(torch, self.dtype)
        return Inputs(batch, self.heads, length, self.dim, dtype, self.device)


@dataclass
class Entry:
    """A variant at one length: what runs, and what is known of it."""

    variant: Variant
    row: Row
    stages: dict[str, list[Stage]] = field(default_factory=dict)  # by kind of pass
    seen: dict[str, Sample] = field(default_factory=dict)


class Speed:
    """All variants at all lengths."""

    def __init__(self, settings: Settings, variants: Sequence[Variant], budget: Budget) -> None:
        self._settings, self._variants, self._budget = settings, variants, budget
        self._clock = Clock(torch.device(settings.device))
        self._slow: dict[str, tuple[int, float]] = {}  # length and milliseconds of a step
        self._uncompiled: dict[str, str] = {}  # variants, and why

    def rows(self, told: Callable[[Row], None] = lambda row: None) -> Iterator[Row]:
        """One record a variant and length."""
        self._compile()
        lengths = self._settings.lengths
        for number, length in enumerate(lengths):
            for row in self._at(length, self._budget.left() / (len(lengths) - number)):
                told(row)
                yield row

    def _compile(self) -> None:
        """Whatever compiles, in half of the time; on a GPU for sizes of any length at once."""
        until, longest = self._budget.left() / 2, 0.0
        for variant in self._variants:
            if not variant.compiles:
                continue
            before = self._budget.left()
            reason = self._budget.refuses(until + longest, compiles=1)
            if reason is not None:
                self._uncompiled[variant.name] = reason
                continue
            self._budget.compiles -= 1
            for batch, length in _WARM if self._settings.device == "cuda" else _WARM[:1]:
                entry = Entry(variant, {"status": ""})
                self._begin(entry, self._settings.inputs(batch, length), None)
                if entry.row["status"]:  # it fails again where it is measured, and is told there
                    break
            longest = max(longest, before - self._budget.left())

    def _at(self, length: int, share: float) -> list[Row]:
        settings, end = self._settings, self._budget.left() - share
        batch = settings.batch(length)
        sizes = {"length": length, "batch": batch, "heads": settings.heads, "dim": settings.dim}
        entries = [
            Entry(v, {"variant": v.name, "ours": v.ours, **sizes, "status": "not run"})
            for v in self._variants
        ]
        inputs, expected = settings.inputs(batch, length), Expected()
        for entry in entries:
            entry.row["reason"] = self._refuses(entry.variant, batch, length, end)
            if entry.row["reason"] is None:
                self._begin(entry, inputs, expected)
        runs = {
            (n, kind): partial(self._run, entry, kind)
            for n, entry in enumerate(entries)
            for kind in entry.stages
        }
        a_round = 1e-3 * sum(sum(e.seen[kind].values()) for e in entries for kind in e.stages)
        left, (least, most) = self._budget.left() - end, settings.rounds
        rounds = min(most, max(least, int(left / (a_round or 1.0))))
        # Half as much again, rather than fewer rounds than are needed.
        for (n, _), samples in alternate(runs, rounds, Budget(1.5 * left), seed=length).items():
            entries[n].row |= summary(samples)
        for entry in entries:
            self._finish(entry, length)
        del inputs, expected, runs
        if settings.device == "cuda":
            torch.cuda.empty_cache()
        return [entry.row for entry in entries]

    def _refuses(self, variant: Variant, batch: int, length: int, end: float) -> str | None:
        """Why a variant is not run at a length, whose time is over when ``end`` is left."""
        reason = self._uncompiled.get(variant.name) or self._budget.refuses(max(0.0, end))
        if reason is not None:
            return reason
        if variant.name in self._slow:
            before, ms = self._slow[variant.name]
            if ms * (length / before) ** 2 > self._settings.slowest:
                return f"it took {ms:.0f} ms at length {before}"
        needs = _HELD * self._settings.heads * length**2 * (batch if variant.learns else 1)
        if variant.dense and needs > 0.7 * free_memory(self._settings.device):
            return f"a dense bias takes about {needs / 2**30:.0f} GiB"
        return None

    def _begin(self, entry: Entry, inputs: Inputs, expected: Expected | None) -> None:
        """The first calls: they may compile, and their results are checked."""
        variant = entry.variant
        params = inputs.params(variant.scheme, variant.learns)
        leaves = [*inputs.tokens, *params.values()] if variant.learns else inputs.tokens
        try:
            call = variant.ready(inputs, params)
            kinds = {"step": training_stages(call, leaves, inputs.d_out)}
            if not variant.learns:
                kinds = {"forward": forward_stages(call)} | kinds
            for kind, stages in kinds.items():
                self._first(entry, kind, stages, inputs, expected, params)
        except Exception as error:  # what is measured may fail in any way, and that is a result
            expects = isinstance(error, NotImplementedError | torch.OutOfMemoryError)
            entry.row["status"] = "refused" if expects else "failed"
            entry.row["reason"] = f"{type(error).__name__}: {said(error)}"

    def _first(
        self,
        entry: Entry,
        kind: str,
        stages: list[Stage],
        inputs: Inputs,
        expected: Expected | None,
        params: dict[str, Tensor],
    ) -> None:
        answers = _answers(stages)
        if expected is not None:
            errors = expected.errors(inputs, entry.variant.scheme, params, answers)
            entry.row["errors"] = entry.row.get("errors", {}) | errors
        del answers
        entry.seen[kind], used, waits = self._clock.first(stages)
        entry.row |= {f"bytes of {kind}": used, f"{kind} makes the host wait": waits}
        entry.stages[kind] = stages

    def _run(self, entry: Entry, kind: str) -> Sample:
        ahead = min(50.0, 1.5 * entry.seen[kind]["host"])
        try:
            sample = self._clock.run(entry.stages[kind], ahead)
        except Exception as error:  # such as memory that others now hold
            entry.row |= {"status": "failed", "reason": f"{type(error).__name__}: {said(error)}"}
            return {}
        return of_forward(sample) if kind == "forward" else in_training(sample)

    def _finish(self, entry: Entry, length: int) -> None:
        row, settings = entry.row, self._settings
        if "forward" not in row and "step" not in row:
            return
        if row["status"] == "not run":  # a step that was refused or failed says so
            row["status"] = "measured"
        worst = [error["relative"] for error in row["errors"].values()]
        row["right"] = all(n is not None and n <= PATHS[settings.dtype] for n in worst)
        pairs = length * (length + 1) / 2
        flops = 4 * row["batch"] * settings.heads * settings.dim * pairs
        for stage, products in {"forward": 1, "backward": 2.5, "step": 3.5}.items():
            if stage in row:
                rate = products * flops / row[stage]["median"] * 1e-9
                row[f"TFLOP/s of {stage}"] = float(f"{rate:.4g}")
        slowest = max(row[stage]["median"] for stage in ("forward", "step") if stage in row)
        self._slow[entry.variant.name] = length, slowest


class Expected:
    """Some rows of the result and of the gradient of q, by the definition in float64."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Tensor]] = {}
        self._rows: Tensor | None = None

    def errors(
        self, inputs: Inputs, scheme: str, params: dict[str, Tensor], answers: dict[str, Tensor]
    ) -> dict[str, dict[str, float | None]]:
        """How far the answers of a variant are from it."""
        if self._rows is None:
            length = inputs.q.shape[2]
            some = torch.randperm(length)[: _SHOWN - 1]
            self._rows = torch.cat([some, torch.tensor([length - 1])]).to(inputs.q.device)
        if scheme not in self._found:
            self._found[scheme] = self._compute(inputs, scheme, params)
        return {
            name: apart(
                array[:1, :, self._rows].detach().double().cpu().numpy(),
                self._found[scheme][name].cpu().numpy(),
            )
            for name, array in answers.items()
        }

    def _compute(self, inputs: Inputs, scheme: str, params: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = self._rows
        q = inputs.q[:1, :, rows].detach().double().requires_grad_()
        k, v = (a[:1].detach().double() for a in (inputs.k, inputs.v))
        own = {name: a.detach().double() for name, a in params.items()}
        k_pos = torch.arange(k.shape[2], device=k.device)
        out = posenc_torch.attention(
            q, k, v, inputs.schemes[scheme], own, causal=True, q_pos=rows, k_pos=k_pos,
            path="reference",
        )  # fmt: skip
        (d_q,) = torch.autograd.grad(out, q, inputs.d_out[:1, :, rows].double())
        return {"out": out.detach(), "q": d_q}


def _answers(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """The result of a forward pass, or the gradient of q of a step."""
    result: Any = None
    for _, stage in stages:
        result = stage(result)
    return {"out": result} if len(stages) == 1 else {"q": result[0]}


def free_memory(device: str) -> int:
    """Bytes."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
