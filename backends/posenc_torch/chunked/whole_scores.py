"""Attention of a part from all of its scores, where SDPA does not serve."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.backend import Call, ChannelDecay, LogSumExp, has_channel_decay
from posenc_torch.chunked.decay import decayed_scores
from posenc_torch.weights import exp


def needs_whole_scores(call: Call) -> bool:
    """Whether a part has to compute all of its scores itself, without SDPA."""
    return call.needs_lse or call.softcap is not None or has_channel_decay(call.scheme)


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    decay: ChannelDecay | None,
) -> tuple[Tensor, LogSumExp]:  # fmt: skip
    """Attention of a part and its log-sum-exp from all of its scores, in the working dtype."""
    dtype, group = call.dtype, q.shape[1] // k.shape[1]
    q, k, v = (a.to(dtype) for a in (q, k, v))
    if group > 1:
        k, v = (a.repeat_interleave(group, dim=1) for a in (k, v))
    q = q * call.scale
    scores = call.cap_scores(q @ k.mT if decay is None else decayed_scores(decay, q, k))
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = torch.where(mask, scores, torch.finfo(dtype).min)
    row_max = scores.amax(dim=-1, keepdim=True).detach()
    weights = exp(scores - row_max)
    if mask is not None:
        weights = torch.where(mask, weights, 0.0)
    row_sum = weights.sum(dim=-1, keepdim=True)
    divisor = torch.where(row_sum == 0, 1.0, row_sum)  # 0 in a fully masked row
    return (weights / divisor) @ v, LogSumExp.of_weights(row_max[..., 0], row_sum[..., 0], call.xp)
