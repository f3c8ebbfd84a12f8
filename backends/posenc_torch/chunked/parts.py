"""How a call is cut into parts, each one call of ``scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.backend import (
    Call,
    has_bias,
    has_bias_by_distance,
    negligible_blocks,
    visible_blocks,
)


class BlockSizes(NamedTuple):
    """How finely a call is cut.

    Attributes
    ----------
    mask
        Queries and keys per block of the block mask and of what is negligible.
    queries
        Queries per part: fewer waste less on the diagonal, more make fewer calls.
    scores
        Scores per part where it holds a bias for each: an array of more than 32 MB is new memory
        each time, which takes a fifth of a training step.
    """

    mask: int = 128
    queries: int = 256
    scores: int = 2**22


_sizes: ContextVar[BlockSizes] = ContextVar("sizes", default=BlockSizes())  # noqa: B039


class Part(NamedTuple):
    """Heads, queries and keys of one call of ``scaled_dot_product_attention``."""

    heads: slice
    queries: slice
    keys: slice


@torch.no_grad()
def parts(call: Call) -> Iterator[Part]:
    """Parts that together hold all visible pairs that are not negligible."""
    size, rows, scores = _sizes.get()
    heads, q_len, k_len = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    any_visible, all_visible = visible_blocks(call, size)
    kept = any_visible[:, None]
    if call.skip_blocks:
        skipped = negligible_blocks(call, size, all_visible=all_visible)
        kept = kept if skipped is None else kept & ~skipped
    group = heads // call.k.shape[1]
    by_pair = has_bias(call.scheme) and not has_bias_by_distance(call)
    for n, chunk in enumerate(kept.any(dim=0).split(rows // size, dim=1)):
        queries = slice(n * rows, min(q_len, (n + 1) * rows))
        for run, (first, last) in _runs(chunk.any(dim=1), heads, group):
            keys = slice(first * size, min(k_len, last * size))
            of_head = call.q.shape[0] * rows * (keys.stop - keys.start)
            most = scores // of_head if by_pair else heads
            for few in _at_most(most, run, group):
                yield Part(few, queries, keys)


def _at_most(count: int, heads: slice, group: int) -> Iterator[slice]:
    """The heads in runs of about ``count``: of whole groups that share keys, or of one head."""
    whole = count >= heads.stop - heads.start
    step = heads.stop - heads.start if whole else max(1, count // group * group)
    for start in range(heads.start, heads.stop, step):
        yield slice(start, min(start + step, heads.stop))


def _runs(kept: Tensor, heads: int, group: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Neighbouring heads with similar ranges of key blocks, from blocks kept ``(H or 1, nk)``.

    Heads that share keys make a run only with each other, unless all of them do.
    """
    count = kept.shape[1]
    first = kept.int().argmax(dim=1).tolist()
    last = (count - kept.flip(1).int().argmax(dim=1)).tolist()
    nonempty = kept.any(dim=1).tolist()
    if len(nonempty) == 1:
        if nonempty[0]:
            yield slice(0, heads), (first[0], last[0])
        return
    start = 0
    while start < heads:
        low, high, work, end = first[start], last[start], 0, start
        while end < heads and nonempty[end] == nonempty[start]:
            together = min(low, first[end]), max(high, last[end])
            separate = work + last[end] - first[end]
            # One call costs about as much as a fifth of its work.
            wasteful = (end + 1 - start) * (together[1] - together[0]) > 1.2 * separate
            if end > start and (wasteful or (group > 1 and end % group == 0)):
                break
            (low, high), work, end = together, separate, end + 1
        if nonempty[start]:
            yield slice(start, end), (low, high)
        start = end


@contextmanager
def small_blocks(size: int) -> Iterator[None]:
    """Blocks of ``size`` queries and keys instead of hundreds, so that short calls have several."""
    token = _sizes.set(BlockSizes(size, size))
    try:
        yield
    finally:
        _sizes.reset(token)
