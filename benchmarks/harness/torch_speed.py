"""Time, memory and errors of variants in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from harness import exact
from harness.clock import Budget, Sample
from harness.correctness import Row
from harness.speed import Entry, Settings, Timing, Variant, error_of, free_memory
from harness.torch_clock import (
    Clock,
    Stage,
    forward_stages,
    in_training,
    of_forward,
    training_stages,
)
from harness.torch_variants import Inputs

# Two lengths: kernels are then compiled for any length. From 1024 keys on, negligible blocks are
# looked for, which compiles too.
_WARM = (1280, 1408)


class Speed(Timing):
    """Variants of PyTorch."""

    def __init__(self, settings: Settings, variants: Sequence[Variant], budget: Budget) -> None:
        super().__init__(settings, variants, budget)
        self._clock = Clock(torch.device(settings.device))
        self._uncompiled: dict[str, str] = {}  # name of a variant -> reason

    def rows(self, on_part: Callable[[list[Row]], None] = lambda rows: None) -> Iterator[Row]:
        """One record per variant and length."""
        self._compile()
        yield from super().rows(on_part)

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
            for length in _WARM if self._settings.device == "cuda" else _WARM[:1]:
                entry = Entry(variant, {"status": ""})
                self._ready(entry, self._inputs(length), None)
                if entry.row["status"]:  # it fails again when measured, and is reported there
                    break
            longest = max(longest, before - self._budget.left())

    def _at(self, length: int, share: float, on_part: Callable[[list[Row]], None]) -> list[Row]:
        rows = super()._at(length, share, on_part)
        if self._settings.device == "cuda":
            torch.cuda.empty_cache()
        return rows

    def _inputs(self, length: int) -> Inputs:
        at, dtype = self._settings, getattr(torch, self._settings.dtype)
        return Inputs(at.heads, length, at.dim, dtype, at.device)

    def _begin(
        self,
        entries: Sequence[Entry],
        inputs: Inputs,
        end: float,
        on_first: Callable[[], None],
    ) -> None:
        """Make the first calls and check their results."""
        expected = Expected(inputs)
        for entry in entries:
            why = self._uncompiled.get(entry.variant.name) or self._refusal(end)
            entry.row["reason"] = why or entry.row["reason"]
            if entry.row["reason"] is None:
                self._ready(entry, inputs, expected)
                on_first()

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
                self._first(entry, kind, stages, expected, params)
        except Exception as error:
            self._fault(entry, error)

    def _first(
        self,
        entry: Entry,
        kind: str,
        stages: list[Stage],
        expected: Expected | None,
        params: dict[str, Tensor],
    ) -> None:
        answers = _answers(stages, ["q", "k", "v", *params])
        again = _answers(stages, ["q", "k", "v", *params])
        entry.row[f"{kind} repeats"] = all(torch.equal(again[n], a) for n, a in answers.items())
        del again
        if expected is not None:
            errors = expected.errors(entry.variant.scheme, params, answers)
            entry.row["errors"] = entry.row.get("errors", {}) | errors
        del answers
        entry.first[kind], used, waits = self._clock.first(stages)
        device = sum(ms for name, ms in entry.first[kind].items() if name != "host")
        entry.row |= {
            f"bytes of {kind}": used,
            f"{kind} makes the host wait": waits,
            f"wall of {kind}": self._clock.wall(stages, device),
        }
        entry.work[kind] = stages

    def _sample(self, entry: Entry, kind: str) -> Sample:
        if self._settings.device == "cpu":
            # Caches and memory are then those of the same call, as in a loop of them. A GPU's
            # caches are flushed.
            self._clock.run(entry.work[kind])
        ahead = min(50.0, 1.5 * entry.first[kind]["host"])
        sample = self._clock.run(entry.work[kind], ahead)
        return of_forward(sample) if kind == "forward" else in_training(sample)

    def _expects(self, error: Exception) -> bool:
        return isinstance(error, NotImplementedError | torch.OutOfMemoryError)

    def _check_device(self) -> None:
        if self._settings.device == "cuda":
            torch.cuda.synchronize()

    def _free(self) -> float:
        return torch.cuda.mem_get_info()[0] if self._settings.device == "cuda" else free_memory()


class Expected:
    """Results and gradients of some heads in float64, computed once for each scheme."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, (_, heads, length, _) = inputs, inputs.q.shape
        self._heads = exact.chosen_heads(heads, length)
        self._expected: dict[str, dict[str, Tensor]] = {}

    def errors(
        self, scheme: str, params: dict[str, Tensor], answers: dict[str, Tensor]
    ) -> dict[str, dict[str, float | None]]:
        """Errors of a variant's arrays, and those that are allowed."""
        if scheme not in self._expected:
            self._expected[scheme] = self._compute(scheme, params)
        dtype = str(self._inputs.q.dtype).removeprefix("torch.")
        errors = {}
        for name, array in answers.items():
            some = array.detach()[0] if array.ndim == 4 else array
            own, expected = some[self._heads].float(), self._expected[scheme][name]
            errors[name] = error_of(name, float(exact.relative_error(xp, own, expected)), dtype)
        return errors

    def _compute(self, scheme: str, params: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs, wide = self._inputs, torch.float64
        tokens = inputs.q, inputs.k, inputs.v, inputs.d_out
        q, k, v, d_out = (a.detach()[0, self._heads].to(wide) for a in tokens)
        heads, length, _ = q.shape
        own = {name: a.detach().to(wide).requires_grad_() for name, a in params.items()}
        at = torch.arange(length, device=q.device)
        bias = exact.bias_by_distance(xp, inputs.schemes[scheme], own, at, wide)
        bias = q.new_zeros(heads, length) if bias is None else bias[self._heads]
        sums = {name: torch.zeros_like(q) for name in ("out", "q", "k", "v")}
        d_bias = torch.zeros_like(bias)
        rows = exact.block_length(heads, length)
        for first in range(0, length, rows):
            upto = first + rows  # keys after the last query are not visible
            block, seen = (slice(None), slice(first, upto)), (slice(None), slice(upto))
            out, d_q, d_k, d_v, diagonals = exact.attend(
                xp, q[block], k[seen], v[seen], d_out[block], bias.detach(),
                at[first:upto, None] - at[:upto],
            )  # fmt: skip
            sums["out"][block], sums["q"][block] = out, d_q
            sums["k"][seen] += d_k
            sums["v"][seen] += d_v
            d_bias[:, :upto] += diagonals[:, :upto].flip(-1)
        if own:
            gradients = torch.autograd.grad(bias, list(own.values()), d_bias)
            sums |= {name: a[self._heads] for name, a in zip(own, gradients, strict=True)}
        if q.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of memory that calls may need
        narrow = {name: a.float() for name, a in sums.items()}
        return narrow | {"out of step": narrow["out"]}


def _answers(stages: Sequence[Stage], names: Sequence[str]) -> dict[str, Tensor]:
    """The result of a forward pass; the result and the gradients of a step."""
    results: list[Any] = [None]
    for _, stage in stages:
        results.append(stage(results[-1]))
    _, out, *rest = results
    if not rest:
        return {"out": out}
    return {"out of step": out} | dict(zip(names, rest[0], strict=False))
