"""Scores of a part whose channels decay."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.backend import ChannelDecay
from posenc_torch.chunked.parts import few_queries
from posenc_torch.fully_masked import is_true

_EVERY = slice(None)


def decayed_scores(decay: ChannelDecay, q: Tensor, k: Tensor) -> Tensor:
    """``(B, H, Q, K)`` of scaled queries ``(B, H, Q, D)`` and keys ``(B, H, K, D)``.

    Keys up to the first that is not before all queries are anchored. The others are computed
    likewise for each half of the queries, until these are few.
    """
    before = decay.lies_before().all(dim=0)
    count = len(before) if is_true(before.all()) else int(before.int().argmin())
    one, other = decay.select(_EVERY, slice(count)).anchored(q, k[:, :, :count])
    scores: Tensor = one @ other.mT
    if count == len(before):
        return scores
    decay, k = decay.select(_EVERY, slice(count, None)), k[:, :, count:]
    if q.shape[2] <= few_queries():
        near = decay.apply(q @ k.mT, q, k)
    else:
        half = q.shape[2] // 2
        halves = [
            decayed_scores(decay.select(few, _EVERY), q[:, :, few], k)
            for few in (slice(half), slice(half, None))
        ]
        near = torch.cat(halves, dim=2)
    return torch.cat([scores, near], dim=3)
