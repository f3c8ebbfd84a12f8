"""Bias and mask of all pairs in one array, from a number for each head and distance.

At default positions a relative bias, a causal mask and a window depend on the distance alone. Then
each row of the array is the next one, shifted by a key. So ``Q + K - 1`` numbers are computed
instead of ``Q K``, and hidden distances are not computed at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from posenc.backend import Call, bias_at_distances, has_bias, has_bias_by_distance
from posenc_torch.tracing import may_read


def mask_table(call: Call) -> Tensor | None:
    """The bias, and ``-inf`` for hidden keys, ``(H or 1, Q + K - 1)``; None if it needs each pair.

    None too unless it is known that every query sees its own key: then no row is fully masked.
    That is read from values.
    """
    if not may_read(call.q) or not _by_distance(call):
        return None
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    left, right = call.mask.offsets()
    nearest, farthest = q_len - 1, k_len - 1  # the largest distances after and before a query
    first = -farthest if left is None else max(-farthest, -left)
    last = nearest if right is None else min(nearest, right)
    if not first <= 0 <= last:
        return None
    table = _bias_between(call, first, last)
    own: list[float] = table.select(1, -first).tolist()
    if not all(map(math.isfinite, own)):
        return None
    if (hidden := (first + farthest, nearest - last)) != (0, 0):
        table = pad(table, hidden, value=-torch.inf)
    return table


def mask_of(table: Tensor, q_len: int, k_len: int) -> Tensor:
    """All pairs of a ``mask_table``, ``(1, H or 1, Q, K)``."""
    if q_len == 1:
        return table[None, :, None]
    return table.unfold(1, k_len, 1).flip(1)[None]


def _by_distance(call: Call) -> bool:
    """Whether bias and mask depend on the distance alone."""
    if not call.plain or call.query.seg is not None or (call.window and call.mask.first_tokens):
        return False
    return has_bias_by_distance(call) if has_bias(call.scheme) else call.aligned


def _bias_between(call: Call, first: int, last: int) -> Tensor:
    """The bias at the distances ``first .. last``, ``(H or 1, n)``; 0 without one."""
    table: Tensor | None = None
    if has_bias(call.scheme):
        at = torch.arange(first, last + 1, dtype=torch.int32)
        table = bias_at_distances(call.scheme, at, call.arrays, dtype=call.dtype, xp=call.xp)
    return torch.zeros((1, last - first + 1), dtype=call.dtype) if table is None else table
