"""Near and far keys: a bias that is constant far away costs nothing there.

T5's bias is read from a table, which takes a load for each score, and an atomic addition for each
in training. From ``max_distance`` on it is one number per head. So FlexAttention is called once for
the blocks of keys that are near, with the table, and once for those that are far, without a bias.
The log-sum-exp of the far blocks gets their number added, and both results are merged by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from posenc import NoPE
from posenc.backend import (
    Call,
    bias_by_distance,
    has_bias_by_distance,
    may_have_negligible_blocks,
    near_diagonals,
)
from posenc_torch.flex import target
from posenc_torch.flex.block_mask import BLOCK, Diagonals
from posenc_torch.flex.ranges import takes_ranges

# Key blocks that a query sees, from which on a second call and the merge are thought to cost less
# than they save.
MIN_BLOCKS = 32


class Part(NamedTuple):
    """Attention to the blocks of keys on some diagonals.

    Attributes
    ----------
    call
        The call, without its bias if the part is far.
    diagonals
        Those of the blocks, ``first`` and ``end``.
    bias
        ``(H or 1, 1)``, the bias of all pairs that is not in ``call``; None for the near part.
    """

    call: Call
    diagonals: Diagonals
    bias: Tensor | None


def bias_at(call: Call, distance: int) -> Tensor | None:
    """The bias of each head at a distance, ``(H or 1, 1)``."""
    bias: Tensor | None = bias_by_distance(call, between=(distance, distance))
    return bias


def near_and_far(call: Call, bias_at: Callable[[Call, int], Tensor | None] = bias_at) -> list[Part]:
    """The near and far parts of a call; empty if it is not worth dividing, or cannot be."""
    left, right = call.scheme.constant_beyond()
    k_len = call.k.shape[2]
    if (
        left is right is None
        or target.is_cpu(call.q)  # its kernels have no log-sum-exp
        or not (call.plain and has_bias_by_distance(call))
        # In a larger graph Inductor (PyTorch 2.13) does not compile whole lists of some diagonals
        # if the length is a symbol.
        or (torch.compiler.is_compiling() and not takes_ranges(call))
        or may_have_negligible_blocks(call)  # a block that is skipped costs still less
        or _window_keys(call) < MIN_BLOCKS * BLOCK
        # Asked last: in a larger graph this is a condition on the length.
        or k_len < MIN_BLOCKS * BLOCK
    ):
        return []
    start, stop = 1 - -(-call.q.shape[2] // BLOCK), -(-k_len // BLOCK)
    first, end = near_diagonals(call, BLOCK)
    far = []
    if left is not None and start < first:
        far.append(_far(call, (None, first), bias_at(call, -left)))
    if right is not None and end < stop and not call.causal:
        far.append(_far(call, (end, None), bias_at(call, right)))
    near = first, None if call.causal else end
    return [Part(replace(call, wants_lse=True), near, None), *far] if far else []


def _window_keys(call: Call) -> float:
    """How many keys the window of a query has; infinity for no end."""
    left, right = call.mask.offsets()
    return math.inf if left is None or right is None else left + right + 1


def _far(call: Call, diagonals: Diagonals, bias: Tensor | None) -> Part:
    without = replace(call, scheme=NoPE(), arrays={}, wants_lse=True)
    return Part(without, diagonals, bias)


def merge(outs: Sequence[Tensor], logs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to all keys and its log-sum-exp, from those of the parts.

    A query without a visible key in a part has there the lowest float as log-sum-exp.
    """
    together = torch.stack(list(logs))
    shares = torch.softmax(together, dim=0)[..., None]  # of sum 1, even where logs are large
    merged = sum(out * share for out, share in zip(outs, shares, strict=True))
    assert isinstance(merged, Tensor)
    return merged.to(outs[0].dtype), torch.logsumexp(together, dim=0)
