"""Attention of a scheme that adjusts whole rows of scores: some queries at a time.

Its arrays then stay in a cache, and memory is ``O(H L)``. The backward pass computes each block of
queries again, with autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from posenc.backend import Call, LogSumExp, dense, of_queries, queries_of
from posenc_torch.chunked.decided import Shown, decides, with_decided
from posenc_torch.chunked.parts import most_queries
from posenc_torch.chunked.passes import only_first_derivatives

_SCORES = 2**19  # at a time

# By the field of a call, and the name among its arrays or features.
_Tensors: TypeAlias = dict[tuple[str, str], Tensor]


def by_rows(call: Call) -> tuple[Tensor, LogSumExp]:
    """``(B, H, Q, Dv)`` and its log-sum-exp, in the working dtype."""
    tensors = _tensors(call)
    # Only autograd keeps tensors for a backward pass: it knows when to free them.
    bare = replace(_with(call, dict.fromkeys(tensors)), sink=None, shared=None)
    count = queries_of(call, _SCORES, most=most_queries(), own_keys=True)
    shown = Shown.of(call)
    out, *lse = _Rows.apply(bare, tuple(tensors), count, shown, *tensors.values())  # type: ignore[no-untyped-call]  # as torch has it
    return out, LogSumExp(*lse)


def _tensors(call: Call) -> _Tensors:
    """What may have a gradient, and what autograd keeps in order to notice changes."""
    own = {"q": call.q, "k": call.k, "v": call.v, "extra_bias": call.extra_bias}
    return {
        **{(field, ""): tensor for field, tensor in own.items() if tensor is not None},
        **{("decides", name): tensor for name, tensor in decides(call).items()},
        **{("arrays", name): tensor for name, tensor in call.arrays.items()},
        **{("query", name): tensor for name, tensor in (call.query.features or {}).items()},
        **{("key", name): tensor for name, tensor in (call.key.features or {}).items()},
    }


def _with(call: Call, tensors: Mapping[tuple[str, str], Any]) -> Call:
    """The same call with these tensors."""

    def named(field: str) -> dict[str, Any]:
        return {name: tensor for (of, name), tensor in tensors.items() if of == field}

    own = {field: tensor for (field, name), tensor in tensors.items() if not name}
    if None not in (kept := named("decides")).values():
        call = with_decided(call, kept)
    return replace(
        call, **own, arrays=named("arrays"), query=call.query.with_features(named("query")),
        key=call.key.with_features(named("key")),
    )  # fmt: skip


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bare: Call, slots: tuple[tuple[str, str], ...], count: int, shown: Shown | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.bare, ctx.slots, ctx.count, ctx.shown = bare, slots, count, shown
        ctx.save_for_backward(*tensors)
        call = _with(bare, dict(zip(slots, tensors, strict=True)))
        # One array for all blocks: theirs would lie between those that the next blocks need.
        rows = call.q.shape[:3]
        out = call.q.new_empty((*rows, call.v.shape[3]), dtype=call.dtype)
        highest, log_total = (call.q.new_empty(rows, dtype=call.dtype) for _ in range(2))
        for queries in _blocks(call, count):
            part = of_queries(call, queries)
            if shown is not None:
                shown.check((queries.start,), part.visible())
            for whole, own in zip((out, highest, log_total), _definition(part), strict=True):
                whole[:, :, queries] = own
        ctx.mark_non_differentiable(highest)
        return out, highest, log_total

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor) -> tuple[Tensor | None, ...]:
        only_first_derivatives(d_results[0])
        saved = dict(zip(ctx.slots, ctx.saved_tensors, strict=True))
        needed = [
            slot for slot, asked in zip(saved, ctx.needs_input_grad[4:], strict=True) if asked
        ]
        call = _with(ctx.bare, {slot: tensor.detach() for slot, tensor in saved.items()})
        totals = {
            slot: torch.zeros_like(
                saved[slot], dtype=torch.promote_types(saved[slot].dtype, torch.float32)
            )
            for slot in needed
        }
        sums = _with(ctx.bare, {**saved, **totals})
        # A backward pass may be called inside autocast.
        with torch.autocast(d_results[0].device.type, enabled=False):
            for queries in _blocks(call, ctx.count):
                part = of_queries(call, queries)
                if ctx.shown is not None:
                    ctx.shown.check((queries.start,), part.visible())
                tensors = _tensors(part)
                leaves = {
                    slot: tensors[slot].detach().to(totals[slot].dtype).requires_grad_()
                    for slot in needed
                }
                with torch.enable_grad():
                    results = _definition(_with(part, {**tensors, **leaves}))
                pairs = [
                    (result, d_result[:, :, queries])
                    for result, d_result in zip(results, d_results, strict=True)
                    if result.requires_grad  # log_total does not depend on v
                ]
                if not pairs:
                    continue
                outputs, d_outputs = zip(*pairs, strict=True)
                found = torch.autograd.grad(
                    outputs, list(leaves.values()), d_outputs, allow_unused=True
                )
                views = _tensors(of_queries(sums, queries))
                for slot, gradient in zip(leaves, found, strict=True):
                    if gradient is not None:
                        views[slot] += gradient
        gradients = {slot: total.to(saved[slot].dtype) for slot, total in totals.items()}
        return None, None, None, None, *(gradients.get(slot) for slot in ctx.slots)


def _blocks(call: Call, count: int) -> Iterator[slice]:
    q_len = call.q.shape[2]
    for start in range(0, q_len, count):
        yield slice(start, min(start + count, q_len))


def _definition(part: Call) -> tuple[Tensor, Tensor, Tensor]:
    """``(B, H, Q, Dv)``, and the ``highest`` and ``log_total`` of its log-sum-exp."""
    q, k, v = (tensor.to(part.dtype) for tensor in (part.q, part.k, part.v))
    out, lse = dense(replace(part, q=q, k=k, v=v))
    return out, *lse
