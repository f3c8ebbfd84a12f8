"""Segments whose tokens lie side by side: each is a call of its own.

A query sees only keys of its segment. In packed documents, and beside padding, the tokens of a
segment are neighbours, so that attention is that of one segment after the other. Such a call has no
segments to compare, and where its positions are in order, its bias is one by distance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from posenc.backend import NO_KEY, NO_QUERY, Call, Tokens
from posenc_torch.chunked.parts import fewest_tokens
from posenc_torch.tracing import may_read


class Run(NamedTuple):
    """Neighbouring tokens of one segment.

    Attributes
    ----------
    start, stop
        The first token, and the one after the last.
    exists
        False for padding.
    in_order
        Whether positions of queries and keys are the same, and rise by 1.
    """

    start: int
    stop: int
    exists: bool
    in_order: bool


class Rows(NamedTuple):
    """Rows ``start .. stop - 1`` of a batch, which have the same runs of tokens."""

    start: int
    stop: int
    runs: tuple[Run, ...]


def side_by_side(call: Call) -> list[Rows] | None:
    """The runs of tokens in each row of a batch; None where a call is not to be split.

    It is not if the tokens of a segment lie apart, or if segments are so short that their calls
    would take longer than one.
    """
    if not _may_split(call):
        return None
    shared = call.shared
    runs = (
        _runs(call) if shared is None else shared.once_of_tokens(call, "runs", partial(_runs, call))
    )
    if runs is None:
        return None
    if len(runs) == 1:
        rows = [Rows(0, call.q.shape[0], runs[0])]
    else:
        groups = (list(own) for _, own in groupby(range(len(runs)), lambda row: runs[row]))
        rows = [Rows(own[0], own[-1] + 1, runs[own[0]]) for own in groups]
    calls = sum(run.exists for own in rows for run in own.runs)
    enough = 0 < calls * fewest_tokens() <= len(rows) * call.q.shape[2]
    return rows if enough else None


def _may_split(call: Call) -> bool:
    """Whether nothing but segments and positions differs between the segments of a call."""
    plain = call.mask.plain and call.mask.first_tokens == 0 and call.extra_bias is None
    alike = call.q.shape[2] == call.k.shape[2] and call.query.seg is not None
    return alike and plain and not call.needs_lse and not call.regions and may_read(call.q)


def _runs(call: Call) -> list[tuple[Run, ...]] | None:
    """The runs of each row, or of all rows; None if a segment has several."""
    sides = (call.query.seg, call.key.seg, call.query.pos, call.key.pos)
    q_seg, k_seg, q_pos, k_pos = np.broadcast_arrays(*(np.atleast_2d(a.numpy()) for a in sides))
    exists = q_seg == k_seg
    if not (exists | ((q_seg == NO_KEY) & (k_seg == NO_QUERY))).all():
        return None
    begins = np.ones(exists.shape, bool)
    begins[:, 1:] = (q_seg[:, 1:] != q_seg[:, :-1]) | (k_seg[:, 1:] != k_seg[:, :-1])
    breaks = np.zeros_like(exists)
    if not call.aligned:
        breaks = q_pos != k_pos
        breaks[:, 1:] |= (np.diff(k_pos.astype(np.int64)) != 1) & ~begins[:, 1:]
    starts = np.flatnonzero(begins)
    row, first = np.divmod(starts, begins.shape[1])
    stops = first + np.diff(starts, append=begins.size)
    own, numbers = exists.ravel()[starts], q_seg.ravel()[starts]
    in_order = np.add.reduceat(breaks.ravel(), starts) == 0
    segments = list(zip(row[own].tolist(), numbers[own].tolist(), strict=True))
    if len(set(segments)) < len(segments):
        return None
    found: list[list[Run]] = [[] for _ in begins]
    columns = (row, first, stops, own, in_order)
    for of, *fields in zip(*(a.tolist() for a in columns), strict=True):
        found[of].append(Run(*fields))
    return [tuple(runs) for runs in found]


def by_segments(call: Call, rows: list[Rows], attend: Callable[[Call], Tensor]) -> Tensor:
    """``(B, H, Q, Dv)``: ``attend`` of each run, and 0 for padding."""
    counts = [own.stop - own.start for own in rows]
    vectors = zip(*(torch.split(a, counts) for a in (call.q, call.k, call.v)), strict=True)
    found = [
        [
            attend(_of_run(call, own, run, *one)) if run.exists else None
            for run, *one in zip(own.runs, *_split(own.runs, every), strict=True)
        ]
        for own, every in zip(rows, vectors, strict=True)
    ]
    like = next(part for parts in found for part in parts if part is not None)

    def zeros(count: int, run: Run) -> Tensor:
        return like.new_zeros((count, like.shape[1], run.stop - run.start, like.shape[3]))

    of_rows = [
        torch.cat(
            [
                zeros(count, run) if part is None else part
                for run, part in zip(own.runs, parts, strict=True)
            ],
            dim=2,
        )
        for count, own, parts in zip(counts, rows, found, strict=True)
    ]
    return torch.cat(of_rows)


def _split(runs: Sequence[Run], vectors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Each array in its runs of tokens: the gradient of a split is one array, not one of each."""
    sizes = [run.stop - run.start for run in runs]
    return [torch.split(array, sizes, dim=2) for array in vectors]


def _of_run(call: Call, rows: Rows, run: Run, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """The call of a run of tokens, as views."""

    def has_batch(array: Tensor) -> bool:
        return array.dim() > 1 and array.shape[0] > 1

    def side(tokens: Tokens) -> Tokens:
        own = tokens.select(slice(run.start, run.stop)).map(
            lambda array: array[rows.start : rows.stop] if has_batch(array) else array
        )
        return replace(own, seg=None)

    query, key = side(call.query), side(call.key)
    in_order = call.keys_in_order or (run.in_order and key.places is None)
    return replace(
        call, q=q, k=k, v=v, query=query, key=key, aligned=run.in_order, keys_in_order=in_order,
        shared=None,
    )  # fmt: skip
