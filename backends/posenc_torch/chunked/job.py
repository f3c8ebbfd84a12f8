"""A call cut into parts: what a part reads, and attention of one part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from posenc.backend import (
    Bounds,
    Call,
    ChannelDecay,
    LogSumExp,
    Tokens,
    as_column,
    as_row,
    bias_by_key,
    dense_bias,
    has_bias,
    has_channel_decay,
    may_be_fully_masked,
    visible_pairs,
)
from posenc_torch.attn_mask import mask_dtype, sees_itself
from posenc_torch.booleans import hiding
from posenc_torch.chunked import fused
from posenc_torch.chunked.decided import Shown, decides, with_decided
from posenc_torch.chunked.parts import Part, parts
from posenc_torch.chunked.scores import Diagonals, Scores, Vectors
from posenc_torch.chunked.table import far, toeplitz, with_mask
from posenc_torch.chunked.tensors import (
    EXTRA_BIAS,
    TABLE,
    Axes,
    K,
    Q,
    Slot,
    Tensors,
    V,
    distances,
    named,
    views,
)
from posenc_torch.chunked.whole_scores import attend, needs_whole_scores
from posenc_torch.fully_masked import is_true, zero_fully_masked
from posenc_torch.sdpa import masked_sdpa
from posenc_torch.tables import read_by_distance
from posenc_torch.underflow import is_large, may_underflow, without_negligible


class Job(NamedTuple):
    """A call without the values of its tensors, and the parts into which it is cut.

    Attributes
    ----------
    call
        The call, with tensors that hold no values.
    slots
        Which tensors autograd keeps.
    table_has_mask
        Whether the table of the bias by distance can also hold the mask, as ``-inf``. Then every
        query sees its own key.
    sees_itself
        Whether every query sees its own key, if no bias hides it.
    has_key_bias
        Whether the bias of visible pairs is ``u(q) + w(k)``. Then none hides a key.
    whole_scores
        Whether a part computes all of its scores itself, without SDPA.
    far
        A distance to earlier keys from which on all have the same bias, some of them visible. None
        if there is none, or if the table does not hold the whole mask.
    fused
        Whether a part calls SDPA's kernel for CPUs itself, which tells the log-sum-exp.
    parts
        The parts, the largest first.
    shown
        What masks of the caller's own showed; None if there are none, or no backward pass.
    """

    call: Call
    slots: tuple[Slot, ...]
    table_has_mask: bool
    sees_itself: bool
    has_key_bias: bool
    whole_scores: bool
    fused: bool
    far: int | None
    parts: Sequence[Part]
    shown: Shown | None = None

    @classmethod
    def of(cls, call: Call, tensors: dict[Slot, Tensor]) -> tuple[Job, dict[Slot, Tensor]]:
        """The job, and its tensors by name; a table may now hold the mask, and less bias."""
        whole_scores, table_has_mask = needs_whole_scores(call), False
        bounds = cache(lambda: _bounds(call))  # for the table and the parts
        if (table := tensors.get(TABLE)) is not None:
            table, table_has_mask = with_mask(call, table, mask_dtype(tensors[Q]), bounds)
            tensors = {**tensors, TABLE: table}
        if not table_has_mask:
            tensors = {**tensors, **{Slot(Axes.UNCUT, n): a for n, a in decides(call).items()}}
        # Only autograd keeps tensors for a backward pass: it knows when to free them.
        bare = replace(
            call, q=_meta_like(call.q), k=_meta_like(call.k), v=_meta_like(call.v),
            arrays={name: _meta_like(array) for name, array in call.arrays.items()},
            query=call.query.with_features({}), key=call.key.with_features({}),
            extra_bias=None, sink=None,
        )  # fmt: skip
        job = cls(
            bare, tuple(tensors), table_has_mask, sees_itself(call),
            call.once("has key bias", lambda: bias_by_key(call) is not None), whole_scores,
            not whole_scores and _is_fused(call, tensors),
            far(call) if table_has_mask else None, parts(call, bounds),
            Shown.of(call),
        )  # fmt: skip
        return job, tensors

    def with_kept(self, tensors: Tensors) -> Job:
        """The job with what autograd kept of the call besides the tensors of its parts."""
        kept = {slot.name: a for slot, a in tensors.items() if slot.axes is Axes.UNCUT}
        return self._replace(call=with_decided(self.call, kept))

    def slices(self, part: Part, tensors: Tensors) -> dict[Slot, Tensor]:
        """The tensors of a part, as views."""
        return {slot: self._slice(slot.axes, part, tensor) for slot, tensor in tensors.items()}

    def _slice(self, axes: Axes, part: Part, tensor: Tensor) -> Tensor:
        """What a part reads of one tensor: a view, or a copy where its keys are two ranges."""
        found, axis = self.views(axes, part, tensor)
        return found[0] if len(found) == 1 else torch.cat(found, dim=axis)

    def views(self, axes: Axes, part: Part, tensor: Tensor) -> tuple[list[Tensor], int]:
        """As ``tensors.views``, of a tensor of this call."""
        return views(axes, part, tensor, self.call.q.shape[1], self.call.q.shape[2])

    def new_result(self, q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``(B, H, Q, Dv)`` for the results of all parts: 0 in rows that no part has.

        In memory the heads of a token follow each other, as in SDPA's result: a model joins them.
        """
        batch, heads, q_len, _ = q.shape
        filled = sum(
            (part.heads.stop - part.heads.start) * (part.queries.stop - part.queries.start)
            for part in self.parts
        )
        new = q.new_empty if filled == heads * q_len else q.new_zeros
        return new((batch, q_len, heads, v.shape[3]), dtype=dtype or q.dtype).transpose(1, 2)

    def far_keys(self, part: Part) -> int:
        """How many keys, from the first one, have the same bias for all queries of a part."""
        if self.far is None:
            return 0
        first_pos = part.queries.start + self.call.k.shape[2] - self.call.q.shape[2]
        count: int = min(part.keys.stop, first_pos - self.far + 1) - part.keys.start
        return max(0, count)

    def table_gradient(
        self, part: Part, tensors: Tensors, scores: Scores, out: Tensor
    ) -> tuple[Tensor, Vectors | None]:
        """The gradient of a part's columns of the table, and what its scores give besides.

        The gradients of a row's scores sum to 0, so that of all far keys is minus the rest. With
        near keys alone there are no gradients of q, k and v.
        """
        table, far_keys = tensors[TABLE], self.far_keys(part)
        # With more far keys, SDPA's pass over all takes less than three products of all scores.
        if 2 * far_keys <= sum(part.key_counts):
            sums, vectors = scores.sums_and_vectors(Diagonals(part.key_counts).sums, 0)
            return sums.sum_to_size(len(table), sums.shape[1]), vectors
        near = scores.near(far_keys, out)
        sums = near.sums(Diagonals((near.k.shape[2],)).sums, 0)
        sums = sums.sum_to_size(len(table), sums.shape[1])
        d_table = torch.zeros_like(table)
        d_table[:, far_keys:] = sums
        first = distances(part.queries, part.keys, self.call.q.shape[2]).start
        nearest_far = self.call.k.shape[2] - 1 - cast(int, self.far)
        d_table[:, nearest_far - first] -= sums.sum(1)
        return d_table, None

    def attend(self, part: Part, tensors: Tensors) -> tuple[Tensor, LogSumExp | None]:
        """Attention of one part from its slices, and the log-sum-exp if the call needs it."""
        one = self.masked(part, tensors)
        if self.whole_scores:
            decay = self._decay(part, tensors) if has_channel_decay(self.call.scheme) else None
            out, lse = attend(self.call, *one[:5], decay)
            return turned(out, tensors), LogSumExp(*(turned(rows, tensors) for rows in lse))
        return turned(masked_sdpa(*one, scale=self.call.scale), tensors), None

    def masked(self, part: Part, tensors: Tensors) -> Masked:
        """One part's queries, keys and values, and the bias and mask between them.

        With a table, queries are in reverse order: each row of the bias is then the previous one,
        shifted by one.
        """
        q, k, v = turned(tensors[Q], tensors), tensors[K], tensors[V]
        if TABLE not in tensors:
            bias, mask, joined = self._tile(part, tensors, q, k)
        else:
            table, mask, joined = tensors[TABLE], None, False
            if self.table_has_mask:
                table = table.to(mask_dtype(q))
            bias = toeplitz(table, q.shape[2], part.key_counts)
            if not self.table_has_mask:
                mask = self._mask(part)
                mask = None if mask is None else mask.flip(2)
                bias, mask, joined = self._joined(bias, mask, q, k, table)
        if mask is not None and may_be_fully_masked(self.call):
            q, k, v = zero_fully_masked(q, k, v, mask)
        return Masked(q, k, v, bias, mask, joined)

    def _tile(
        self, part: Part, tensors: Tensors, q: Tensor, k: Tensor
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """Bias and mask of a part, pair by pair, and whether they are joined."""
        call, mask, bias = self.call, self._mask(part), tensors.get(EXTRA_BIAS)
        if has_bias(call.scheme):
            query, key = call.query.select(part.queries), _keys_of(part, call.key)
            term = dense_bias(
                call.scheme, as_column(query.encoded_pos), as_row(key.encoded_pos),
                named(tensors, Axes.HEADS, Axes.NONE),
                query=named(tensors, Axes.OF_QUERIES), key=named(tensors, Axes.OF_KEYS),
                dtype=call.dtype, xp=call.xp, read=read_by_distance,
                consecutive=call.in_order and part.first is None,
            )  # fmt: skip
            bias = term if bias is None or term is None else bias + term
            bias = tensors.get(EXTRA_BIAS) if bias is None else bias
        if bias is None:
            return None, mask, False
        # A bias by key has the same span in each row.
        return self._joined(bias, mask, q, k, bias[:, :, :1] if self.has_key_bias else bias)

    def _joined(
        self, bias: Tensor, mask: Tensor | None, q: Tensor, k: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Bias and mask of a part, and whether the first has the second.

        ``values`` are among those of the bias, and span as much as any row of it.
        """
        lowest, highest = values.detach().aminmax()
        finite = self.has_key_bias or is_true((lowest > -torch.inf) & (highest < torch.inf))
        joined = False
        if not finite:
            shown = bias != -torch.inf
            mask = shown if mask is None else mask & shown
            bias = torch.where(shown, bias, 0.0)
            lowest, highest = bias.detach().aminmax()  # of the keys that it shows
        elif mask is not None and (self.sees_itself or not self.whole_scores):
            # Adding takes an eighth of the time of where(mask, bias, -inf).
            # In this order: a table has no order of axes that the sum could take.
            bias, joined = hiding(mask, bias.dtype) + bias, True
        if not self.whole_scores and (may_underflow(lowest, highest) or is_large(highest)):
            seen, is_new = None if joined else mask, joined or not finite
            bias = without_negligible(self.call, bias, seen, q, k, may_change=is_new)
        return bias, None if joined and self.sees_itself else mask, joined

    def _decay(self, part: Part, tensors: Tensors) -> ChannelDecay:
        """How the channels of a part's scores decay."""
        call = self.call
        query, key = call.query.select(part.queries), _keys_of(part, call.key)
        return ChannelDecay(
            call.scheme, call.xp, call.dtype, named(tensors, Axes.HEADS, Axes.NONE),
            query.with_features(named(tensors, Axes.OF_QUERIES)),
            key.with_features(named(tensors, Axes.OF_KEYS)),
        )  # fmt: skip

    def _mask(self, part: Part) -> Tensor | None:
        """The visible pairs of a part; None if all pairs are visible."""
        call, mask = self.call, self.call.mask
        if mask.array is not None:
            mask = replace(mask, array=self._slice(Axes.PAIRS, part, mask.array))
        query, key = call.query.select(part.queries), _keys_of(part, call.key)
        pairs = visible_pairs(mask, query, key, call.xp)
        if self.shown is not None:
            self.shown.check((part.heads.start, part.queries.start, part.keys.start), pairs)
        return pairs


class Masked(NamedTuple):
    """Queries, keys and values of a part; a bias and a mask, if any, for each of their pairs.

    ``joined`` says that the bias is ``-inf`` where the mask hides; without a mask it always is.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    joined: bool = False


@torch.no_grad()
def _bounds(call: Call) -> Bounds | None:
    return Bounds.of(call)


def turned(rows: Tensor, tensors: Tensors) -> Tensor:
    """Rows ``(B, H, Q, ...)`` in reverse order if there is a table."""
    return rows.flip(2) if TABLE in tensors else rows


def _keys_of(part: Part, side: Tokens) -> Tokens:
    """Positions and segments of a part's keys, whose features are elsewhere."""
    if part.first is None:
        return side.select(part.keys)
    pos, seg, places = (
        None if a is None else torch.cat([a[..., keys] for keys in part.ranges], dim=-1)
        for a in (side.pos, side.seg, side.places)
    )
    return Tokens(pos, seg, places, features={})


def _meta_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype without values."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _is_fused(call: Call, tensors: Tensors) -> bool:
    """Whether parts call SDPA's kernel for CPUs themselves.

    Not for a bias that is learned in half precision: its gradient would have the rounding of the
    result.
    """
    q, k, v, *others = tensors.values()
    learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in others)
    return (q.dtype == call.dtype or not learned) and fused.fused(q, k, v)
