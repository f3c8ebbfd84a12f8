"""Time, memory and errors of variants in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import posenc_torch
from harness.clock import Budget, Sample
from harness.correctness import Row, array_errors
from harness.speed import SHOWN, Entry, Settings, Timing, Variant, free_memory
from harness.torch_clock import (
    Clock,
    Stage,
    forward_stages,
    in_training,
    of_forward,
    training_stages,
)
from harness.torch_variants import Inputs

# Two small calls of different lengths: kernels are then compiled for any length. The batch is 1,
# because the compiler specialises on 1.
_WARM = ((1, 256), (1, 384))


class Speed(Timing):
    """Variants of PyTorch."""

    def __init__(self, settings: Settings, variants: Sequence[Variant], budget: Budget) -> None:
        super().__init__(settings, variants, budget)
        self._clock = Clock(torch.device(settings.device))
        self._uncompiled: dict[str, str] = {}  # name of a variant -> reason

    def rows(self, on_result: Callable[[Row], None] = lambda row: None) -> Iterator[Row]:
        """One record per variant and length."""
        self._compile()
        yield from super().rows(on_result)

    def _compile(self) -> None:
        """Compile variants, in half of the time; on a GPU for all lengths at once."""
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
                self._ready(entry, self._inputs(batch, length), None)
                if entry.row["status"]:  # it fails again when measured, and is reported there
                    break
            longest = max(longest, before - self._budget.left())

    def _at(self, length: int, share: float) -> list[Row]:
        rows = super()._at(length, share)
        if self._settings.device == "cuda":
            torch.cuda.empty_cache()
        return rows

    def _inputs(self, batch: int, length: int) -> Inputs:
        at, dtype = self._settings, getattr(torch, self._settings.dtype)
        return Inputs(batch, at.heads, length, at.dim, dtype, at.device)

    def _begin(self, entries: Sequence[Entry], inputs: Inputs, end: float) -> None:
        """Make the first calls and check their results."""
        expected = Expected()
        for entry in entries:
            why = self._uncompiled.get(entry.variant.name) or self._refusal(end)
            entry.row["reason"] = why or entry.row["reason"]
            if entry.row["reason"] is None:
                self._ready(entry, inputs, expected)

    def _ready(self, entry: Entry, inputs: Inputs, expected: Expected | None) -> None:
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
        except Exception as error:
            self._fault(entry, error)

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
        entry.first[kind], used, waits = self._clock.first(stages)
        entry.row |= {f"bytes of {kind}": used, f"{kind} makes the host wait": waits}
        entry.work[kind] = stages

    def _sample(self, entry: Entry, kind: str) -> Sample:
        ahead = min(50.0, 1.5 * entry.first[kind]["host"])
        sample = self._clock.run(entry.work[kind], ahead)
        return of_forward(sample) if kind == "forward" else in_training(sample)

    def _expects(self, error: Exception) -> bool:
        return isinstance(error, NotImplementedError | torch.OutOfMemoryError)

    def _free(self) -> float:
        return torch.cuda.mem_get_info()[0] if self._settings.device == "cuda" else free_memory()


class Expected:
    """Some rows of the result and of the gradient of q, by the reference in float64."""

    def __init__(self) -> None:
        self._expected: dict[str, dict[str, Tensor]] = {}
        self._rows: Tensor | None = None

    def errors(
        self, inputs: Inputs, scheme: str, params: dict[str, Tensor], answers: dict[str, Tensor]
    ) -> dict[str, dict[str, float | None]]:
        """Errors of a variant's arrays."""
        if self._rows is None:
            length = inputs.q.shape[2]
            some = torch.randperm(length)[: SHOWN - 1]
            self._rows = torch.cat([some, torch.tensor([length - 1])]).to(inputs.q.device)
        if scheme not in self._expected:
            self._expected[scheme] = self._compute(inputs, scheme, params)
        return {
            name: array_errors(
                array[:1, :, self._rows].detach().double().cpu().numpy(),
                self._expected[scheme][name].cpu().numpy(),
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
            implementation="reference",
        )  # fmt: skip
        (d_q,) = torch.autograd.grad(out, q, inputs.d_out[:1, :, rows].double())
        return {"out": out.detach(), "q": d_q}


def _answers(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """The result of a forward pass, or the gradient of q of a step."""
    result: Any = None
    for _, stage in stages:
        result = stage(result)
    return {"out": result} if len(stages) == 1 else {"q": result[0]}
