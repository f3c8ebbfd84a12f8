"""The forward and the backward pass over the parts of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.backend import LogSumExp
from posenc_torch.attn_mask import as_attn_mask, mask_dtype
from posenc_torch.chunked import fused
from posenc_torch.chunked.by_key import KeySums, serves
from posenc_torch.chunked.job import Job, turned
from posenc_torch.chunked.parts import Part
from posenc_torch.chunked.scores import Scores
from posenc_torch.chunked.tensors import TABLE, K, Q, Slot, Tensors, V


class Fused(torch.autograd.Function):
    """Attention by SDPA's kernel for CPUs, which gives each part's log-sum-exp to its gradient."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> Tensor:
        given = dict(zip(job.slots, tensors, strict=True))
        q = given[Q]
        out = job.new_result(q, given[V])
        # Arrays of their own for each part would lie between those that the next parts need, and
        # leave gaps too small for them: memory that grows with the square of the length.
        kept = fused.kept(q, given[V]) if any(ctx.needs_input_grad) else None
        for part in job.parts:
            slices = job.slices(part, given)
            one = job.masked(part, slices)
            term, fully_masked = as_attn_mask(one.bias, one.mask, mask_dtype(q), one.joined)
            result = fused.forward(one.q, one.k, one.v, term, job.call.scale)
            part_out = result.out[..., : out.shape[3]]
            if fully_masked is not None:
                part_out = torch.where(fully_masked, 0.0, part_out)
            out[:, part.heads, part.queries] = turned(part_out, slices)
            for whole, own in zip(kept or (), result, strict=False):
                whole[:, part.heads, part.queries] = own
        ctx.job = job
        ctx.save_for_backward(*tensors, *(kept or ()))
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        only_first_derivatives(d_out)
        job: Job = ctx.job
        *saved, outs, lses = ctx.saved_tensors
        given = dict(zip(job.slots, saved, strict=True))
        job = job.with_kept(given)
        sums = _Sums(job, given, ctx.needs_input_grad[1:])
        learns = [n for n in sums.slots if n not in (Q, K, V)]
        by_key = KeySums(job, given) if learns and serves(job) else None
        if by_key is not None:
            given = by_key.widened(given)
            outs, d_out = by_key.of_width(outs), by_key.of_width(d_out)
        # Otherwise autograd computes them from the gradient of each score, or of a table's entry.
        leaves = [n for n in learns if by_key is None and n != TABLE]
        # A backward pass may be called inside autocast.
        with torch.autocast(d_out.device.type, enabled=False):
            for part in job.parts:
                out, lse = (a[:, part.heads, part.queries] for a in (outs, lses))
                tensors = {n: t.detach() for n, t in job.slices(part, given).items()}
                learned = {n: tensors[n].requires_grad_() for n in leaves}
                with torch.set_grad_enabled(bool(learned)):
                    q, k, v, bias, mask, joined = job.masked(part, tensors)
                d_part = turned(d_out[:, part.heads, part.queries], tensors)
                detached = None if bias is None else bias.detach()
                term, fully_masked = as_attn_mask(detached, mask, mask_dtype(q), joined)
                if fully_masked is not None:
                    d_part = torch.where(fully_masked, 0.0, d_part)
                vectors: tuple[Tensor, Tensor, Tensor] | None = None
                if learns and by_key is None and bias is not None and term is not None:
                    scores = Scores.of(
                        d_part, q, k, v, term, lse, scale=job.call.scale, dtype=job.call.dtype
                    )
                    if TABLE in learns:
                        d_table, vectors = job.table_gradient(part, tensors, scores, out)
                        sums.add(part, {TABLE: d_table})
                    elif bias.requires_grad:
                        d_bias, vectors = scores.of_bias(bias)
                        d_learned = torch.autograd.grad(
                            bias, list(learned.values()), d_bias, allow_unused=True
                        )
                        sums.add(part, dict(zip(learned, d_learned, strict=True)))
                if vectors is None:
                    result = fused.Result(out, lse)
                    vectors = fused.backward(d_part, q, k, v, result, term, job.call.scale)
                d_q, d_k, d_v = vectors
                d_q = turned(d_q, tensors)
                if by_key is not None:
                    by_key.add(part, d_q, d_k)
                sums.add(part, {Q: d_q, K: d_k, V: d_v})
        if by_key is not None:
            sums.add_whole(by_key.gradients(learns))
        return None, *sums.results()


class Recomputed(torch.autograd.Function):
    """Attention part by part; the backward pass computes each part again, with autograd."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        given = dict(zip(job.slots, tensors, strict=True))
        q = given[Q]
        dtype = job.call.dtype if job.whole_scores else q.dtype
        out = job.new_result(q, given[V], dtype)
        if not job.whole_scores:
            for part in job.parts:
                out[:, part.heads, part.queries], _ = job.attend(part, job.slices(part, given))
            return out
        lowest, rows = torch.finfo(dtype).min, q.shape[:3]
        lse = LogSumExp(*(q.new_full(rows, low, dtype=dtype) for low in (lowest, -torch.inf)))
        for part in job.parts:
            results = _results(job, part, job.slices(part, given))
            for whole, own in zip((out, *lse), results, strict=True):
                whole[:, part.heads, part.queries] = own
        ctx.mark_non_differentiable(lse.highest)
        return out, *lse

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor) -> tuple[Tensor | None, ...]:
        only_first_derivatives(d_results[0])
        job: Job = ctx.job
        given = dict(zip(job.slots, ctx.saved_tensors, strict=True))
        job = job.with_kept(given)
        sums = _Sums(job, given, ctx.needs_input_grad[1:])
        # As in the forward pass; a backward pass may be called inside autocast.
        with torch.autocast(given[Q].device.type, enabled=False):
            for part in job.parts:
                tensors = {n: t.detach() for n, t in job.slices(part, given).items()}
                leaves = [tensors[slot].requires_grad_() for slot in sums.slots]
                with torch.enable_grad():
                    results = _results(job, part, tensors)
                pairs = [
                    (result, d_result[:, part.heads, part.queries])
                    for result, d_result in zip(results, d_results, strict=True)
                    if result.requires_grad  # False if no leaf takes part
                ]
                if not pairs:
                    continue
                outputs, d_outputs = zip(*pairs, strict=True)
                d_leaves = torch.autograd.grad(outputs, leaves, d_outputs, allow_unused=True)
                sums.add(part, dict(zip(sums.slots, d_leaves, strict=True)))
        return None, *sums.results()


def _results(job: Job, part: Part, tensors: Tensors) -> tuple[Tensor, ...]:
    """The result of a part, and the log-sum-exp if the call needs it."""
    out, lse = job.attend(part, tensors)
    return out, *(lse or ())


def only_first_derivatives(d_result: Tensor) -> None:
    """Refuse second derivatives, and several first ones at a time."""
    if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(d_result):
        raise NotImplementedError(
            "implementation 'chunked' has first derivatives only, of one result at a time "
            "(create_graph and is_grads_batched ask for more): use implementation='reference'"
        )


class _Sums:
    """Gradients of a job's tensors, to which parts add.

    Sums over hundreds of parts need float32. Each query is in one part.
    """

    def __init__(self, job: Job, tensors: Tensors, needs_grad: Sequence[bool]) -> None:
        self._job, self._tensors = job, tensors
        self._dtypes = {
            slot: t.dtype if slot == Q else torch.promote_types(t.dtype, torch.float32)
            for (slot, t), needed in zip(tensors.items(), needs_grad, strict=True)
            if needed
        }
        self._totals: dict[Slot, Tensor] = {}

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Which tensors need a gradient."""
        return tuple(self._dtypes)

    def add(self, part: Part, gradients: Mapping[Slot, Tensor | None]) -> None:
        """Add the gradients of a part; None is one of 0, others than ``slots`` are ignored.

        What is given for k and v is nobody else's: the first may become the total.
        """
        for slot in self._dtypes:
            gradient, shape = gradients.get(slot), self._tensors[slot].shape
            if gradient is None:
                continue
            if slot in (Q, K, V) and gradient.shape[3] > shape[3]:
                gradient = gradient[..., : shape[3]]  # the rest are of ``KeySums``
            elif slot in (K, V) and self._is_first_of_all(slot, part, gradient):
                self._totals[slot] = gradient
                continue
            whole = self._total(slot)
            totals, axis = self._job.views(slot.axes, part, whole)
            pieces: Sequence[Tensor] = (gradient,)
            if len(totals) > 1:
                pieces = torch.split(gradient, [total.shape[axis] for total in totals], dim=axis)
            for total, own in zip(totals, pieces, strict=True):
                if slot == Q:
                    total.copy_(own)
                else:
                    total += own

    def add_whole(self, gradients: Mapping[Slot, Tensor]) -> None:
        """Add the gradients of whole tensors."""
        for slot, gradient in gradients.items():
            self._total(slot).add_(gradient)

    def results(self) -> list[Tensor | None]:
        """The gradient of each tensor in its dtype; None if no part uses it."""
        for slot in {Q, K, V} & self._dtypes.keys():
            self._total(slot)  # of padding alone they are 0
        return [
            self._totals[slot].to(t.dtype) if slot in self._totals else None
            for slot, t in self._tensors.items()
        ]

    def _total(self, slot: Slot) -> Tensor:
        if slot not in self._totals:
            like = self._tensors[slot]
            self._totals[slot] = torch.zeros_like(like, dtype=self._dtypes[slot])
        return self._totals[slot]

    def _is_first_of_all(self, slot: Slot, part: Part, gradient: Tensor) -> bool:
        """Whether a gradient is the first one, and of all heads and keys."""
        first = slot not in self._totals and gradient.dtype == self._dtypes[slot]
        return first and gradient.shape == self._tensors[slot].shape and part.first is None
