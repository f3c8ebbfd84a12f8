"""The gradient of a bias ``u(q) + w(k)`` of earlier keys, from sums of the scores' gradients.

The gradients of a row's scores sum to 0, so that of ``u`` is 0, and that of ``w`` at a key is the
sum over queries. SDPA's backward pass gives these sums: they are the gradient of a channel that is
1 in every query and 0 in every key, which adds nothing to scores. So no score is computed again.

A relative bias of this form is ``m (k - q)`` for each head. Its gradient is one number, a sum over
all pairs, in which distances are those from a part's first query: farther ones would be rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from posenc.backend import PositionScheme, as_row, reads_features
from posenc_torch.chunked.job import Job
from posenc_torch.chunked.parts import Part
from posenc_torch.chunked.tensors import TABLE, Axes, K, Q, Slot, Tensors, V, named


def serves(job: Job) -> bool:
    """Whether the gradient of a call's bias needs no more than these sums."""
    if not job.has_key_bias or job.call.scale == 0:
        return False
    # Of another bias the positions themselves count, which may be large.
    terms = job.call.scheme.bias_terms()
    return all(_is_linear(term) or reads_features(term) for _, term in terms)


def _is_linear(term: PositionScheme) -> bool:
    return term.relative and not reads_features(term)


class KeySums:
    """The sums over the parts of a call, from gradients of channels that are added for them.

    Queries get one channel for each head of a group that shares keys, which is 1 in that head, and
    one of 0. Keys get as many of 0, and one of 1: its gradient, in queries, is the sum of a row.
    That is 0 but for rounding, which would add up over queries, and is taken from a key instead.
    """

    def __init__(self, job: Job, tensors: Tensors) -> None:
        self._job, self._tensors = job, tensors
        q, k = tensors[Q], tensors[K]
        self._group = q.shape[1] // k.shape[1]
        self._width = max(q.shape[3], tensors[V].shape[3])
        self._of_keys = q.new_zeros((q.shape[0], q.shape[1], k.shape[2]))
        self._by_distance = q.new_zeros(q.shape[:2], dtype=torch.float64)

    def widened(self, tensors: Tensors) -> dict[Slot, Tensor]:
        """The tensors with the channels."""
        q, k, v = (self.of_width(tensors[slot]) for slot in (Q, K, V))
        for head in range(q.shape[1]):
            q[:, head, :, self._width + head % self._group] = 1
        k[..., -1] = 1
        return {**tensors, Q: q, K: k, V: v}

    def of_width(self, array: Tensor) -> Tensor:
        """Values, or what a forward pass made of them, with channels of 0."""
        return pad(array, (0, self._width + self._group + 1 - array.shape[3]))

    def add(self, part: Part, d_q: Tensor, d_k: Tensor) -> None:
        """Add the gradients of the widened queries and keys of a part."""
        call = self._job.call
        rows = d_q[..., -1] / call.scale
        of_heads = d_k[..., self._width : -1].mT.flatten(1, 2) / call.scale
        first = part.heads.start // self._group * self._group
        columns = of_heads[:, part.heads.start - first : part.heads.stop - first]
        ranges = torch.split(columns, list(part.key_counts), dim=2)
        query, key = (
            side.pos if side.pos.ndim == 2 else side.pos[None] for side in (call.query, call.key)
        )
        start = query[:, part.queries.start, None]
        for keys, sums in (*zip(part.ranges, ranges, strict=True), self._at_own_keys(part, rows)):
            self._of_keys[:, part.heads, keys] += sums
            distances = (key[:, keys] - start)[:, None]
            self._by_distance[:, part.heads] += (distances * sums.double()).sum(2)

    def _at_own_keys(self, part: Part, rows: Tensor) -> tuple[slice, Tensor]:
        """The sums of rows, taken from the keys that stand where the queries do."""
        before = self._of_keys.shape[2] - self._job.call.q.shape[2]
        first, last = (max(0, n + before) for n in (part.queries.start, part.queries.stop))
        return slice(first, last), -rows[:, :, rows.shape[2] - (last - first) :]

    def gradients(self, slots: Sequence[Slot]) -> dict[Slot, Tensor]:
        """The gradients of the tensors of ``slots``, from which the bias is computed."""
        if TABLE in slots:
            return {TABLE: self._of_table(self._tensors[TABLE])}
        leaves = {slot: self._tensors[slot].detach().requires_grad_() for slot in slots}
        given = {**self._tensors, **leaves}
        call = self._job.call
        call = replace(
            call,
            arrays=named(given, Axes.HEADS, Axes.NONE),
            query=call.query.with_features(named(given, Axes.OF_QUERIES)),
            key=call.key.with_features(named(given, Axes.OF_KEYS)),
        )
        outputs, d_outputs = [], []
        with torch.enable_grad():
            for term in call.bias_terms():
                at, d_of_key = as_row(call.key.pos), self._of_keys[:, :, None]
                if _is_linear(term.scheme):  # the difference of two keys, one apart
                    at = torch.arange(2, dtype=at.dtype, device=at.device)[None, None, None]
                    slope = self._by_distance.to(d_of_key.dtype)[..., None, None]
                    d_of_key = torch.cat([-slope, slope], dim=-1)
                of_key = term.scheme.key_bias(at, params=term.views(), xp=call.xp)
                if of_key is not None and of_key.requires_grad:
                    outputs.append(of_key)
                    d_outputs.append(d_of_key.sum_to_size(of_key.shape))
        if not outputs:
            return {}
        found: tuple[Any, ...] = torch.autograd.grad(
            outputs, list(leaves.values()), d_outputs, allow_unused=True, materialize_grads=True
        )
        return dict(zip(leaves, found, strict=True))

    def _of_table(self, table: Tensor) -> Tensor:
        """A gradient of the table by distance, equal for a bias that is linear in distance.

        It is at the farthest and at the nearest earlier key that are not hidden.
        """
        earlier = self._job.call.k.shape[2]  # with the own key, at the distances up to 0
        seen = (table[:, :earlier] > -torch.inf).int()
        nearest, farthest = earlier - 1 - seen.flip(1).argmax(1), seen.argmax(1)
        slope = self._by_distance.sum(0).sum_to_size(len(table))
        slope = (slope / (nearest - farthest).clamp(min=1)).to(table.dtype)
        slope = torch.where(nearest > farthest, slope, 0.0)
        d_table = torch.zeros_like(table)
        d_table.scatter_(1, nearest[:, None], slope[:, None])
        d_table.scatter_add_(1, farthest[:, None], -slope[:, None])
        return d_table
