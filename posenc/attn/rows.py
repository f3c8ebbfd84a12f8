"""Whole rows of scores, of a few queries at a time: for schemes that adjust them."""

from __future__ import annotations

import math
from dataclasses import replace

from posenc.attn.call import Call
from posenc.contract.protocol import Hook
from posenc.contract.specs import Array

_FEWEST = 16  # queries, however long a row is


def adjusts_rows(call: Call) -> bool:
    """Whether the scheme of a call adjusts whole rows of scores."""
    return Hook.ADJUST_SCORES in call.scheme.hooks()


def queries_of(call: Call, scores: int, *, most: int, own_keys: bool = False) -> int:
    """How many queries at a time have about so many scores, in all heads of a batch.

    ``own_keys``: each block of queries reads only the keys that ``of_queries`` leaves to it.
    """
    batch, heads, q_len, _ = call.q.shape
    if call.scheme.key_paths:
        many: int = min(q_len, most)
        return many
    of_head: int = scores // (batch * heads)
    count = of_head // call.k.shape[2]
    left, right = call.offsets
    if own_keys and left is not None and right is not None:
        # n queries in a row read about n + left + right keys.
        near = left + right
        count = max(count, (math.isqrt(near**2 + 4 * of_head) - near) // 2)
    found: int = min(q_len, most, max(_FEWEST, count))
    return found


def of_queries(call: Call, queries: slice) -> Call:
    """The same call of some of its queries, as views.

    Keys that a causal mask or a window hides from all of these queries are left out, if positions
    are the default: no score of a row may depend on them.
    """
    k_len = call.k.shape[2]
    before = k_len - call.q.shape[2]  # keys before the place of the first query
    left, right = call.offsets
    start = 0 if left is None else max(0, before + queries.start - left)
    stop = k_len if right is None else min(k_len, before + queries.stop + right)
    keys = slice(start, stop)

    def pairs(array: Array) -> Array:
        return array[:, :, queries, keys]

    mask, bias = call.mask, call.extra_bias
    if mask.array is not None:
        mask = replace(mask, array=pairs(mask.array))
    return replace(
        call, q=call.q[:, :, queries], k=call.k[:, :, keys], v=call.v[:, :, keys],
        query=call.query.select(queries), key=call.key.select(keys), mask=mask,
        extra_bias=None if bias is None else pairs(bias), aligned=False, shared=None,
    )  # fmt: skip
