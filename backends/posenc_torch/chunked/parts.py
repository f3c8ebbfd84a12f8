"""How a call is cut into parts, each one call of ``scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.backend import (
    Call,
    negligible_blocks,
    visible_blocks,
)

_GRAIN = 128  # of what is seen and what is negligible
_ROWS = 256  # queries a part: fewer waste less on the diagonal, more make fewer calls
_size = _GRAIN, _ROWS


class Part(NamedTuple):
    """Heads, queries and keys of one call of ``scaled_dot_product_attention``."""

    heads: slice
    queries: slice
    keys: slice


@torch.no_grad()
def parts(call: Call) -> Iterator[Part]:
    """Parts that together hold all pairs which see each other and leave a trace."""
    grain, rows = _size
    heads, q_len, k_len = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    any_visible, all_visible = visible_blocks(call, grain)
    kept = any_visible[:, None]
    if call.skip_blocks:
        negligible = negligible_blocks(call, grain, all_visible=all_visible)
        kept = kept if negligible is None else kept & ~negligible
    for n, chunk in enumerate(kept.any(dim=0).split(rows // grain, dim=1)):
        queries = slice(n * rows, min(q_len, (n + 1) * rows))
        for own, (first, last) in _runs(chunk.any(dim=1), heads, heads // call.k.shape[1]):
            yield Part(own, queries, slice(first * grain, min(k_len, last * grain)))


def _runs(kept: Tensor, heads: int, group: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Neighbouring heads with about the same blocks of keys, from blocks kept ``(H or 1, nk)``.

    Heads that share keys make a run only with each other, unless all of them do.
    """
    count = kept.shape[1]
    first = kept.int().argmax(dim=1).tolist()
    last = (count - kept.flip(1).int().argmax(dim=1)).tolist()
    some = kept.any(dim=1).tolist()
    if len(some) == 1:
        if some[0]:
            yield slice(0, heads), (first[0], last[0])
        return
    start = 0
    while start < heads:
        low, high, work, end = first[start], last[start], 0, start
        while end < heads and some[end] == some[start]:
            together = min(low, first[end]), max(high, last[end])
            own = work + last[end] - first[end]
            # One call costs about as much as a fifth of the work it does.
            apart = (end + 1 - start) * (together[1] - together[0]) > 1.2 * own
            if end > start and (apart or (group > 1 and end % group == 0)):
                break
            (low, high), work, end = together, own, end + 1
        if some[start]:
            yield slice(start, end), (low, high)
        start = end


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """So many queries and keys a block, instead of hundreds: for tests."""
    global _size
    before, _size = _size, (size, size)
    try:
        yield
    finally:
        _size = before
