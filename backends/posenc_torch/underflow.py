"""A bias without the keys whose weights may be subnormal numbers.

Some processors calculate a hundred times more slowly with subnormal numbers, float32 numbers below
``2**-126``. The gradients of SDPA are products with its weights, and a weight is such a number if
its score is 87 to 104 below the highest of its row. Where the weight of a key is provably
negligible (``posenc.attn.negligible``), its bias is ``-inf`` here, and its weight 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posenc.backend import Call, entry_margin, max_score
from posenc_torch.fully_masked import is_true

_LARGE = 64.0  # a float32 score beside it is off by 4e-6
_ALIKE = 4.0  # rows whose highest biases differ by no more have one threshold


def may_underflow(lowest: Tensor, highest: Tensor) -> bool:
    """Whether a bias between these is so much lower for some keys that a look pays: on a CPU."""
    return lowest.device.type == "cpu" and is_true(highest - lowest > _span(lowest.dtype))


def is_large(*biases: Tensor) -> bool:
    """Whether scores beside one of these biases lose digits, which softmax does not need to."""
    return any(is_true(bias.abs() > _LARGE) for bias in biases)


def highest_of_rows(bias: Tensor, mask: Tensor | None) -> Tensor:
    """The highest visible value per row, ``(..., Q, 1)``; 0 in fully masked rows."""
    visible = bias.detach() if mask is None else torch.where(mask, bias.detach(), -torch.inf)
    highest = visible.amax(dim=-1, keepdim=True)
    return torch.where(highest == -torch.inf, 0.0, highest)


@torch.no_grad()
def lowest_by_distance(table: Tensor, own: int) -> float | None:
    """How far the lowest finite entry of a bias by distance is below that of a query's own key.

    ``own`` is the column of the own key. None if it is so high that no look pays, and on other
    devices than a CPU.
    """
    if table.device.type != "cpu":
        return None
    below = table[:, own, None] - table
    lowest: float = torch.where(table > -torch.inf, below, 0.0).amax().item()
    return lowest if lowest > _span(table.dtype) else None


def _span(dtype: torch.dtype) -> float:
    """In float32 58: two thirds of 87. Scores without a bias seldom differ by the rest."""
    return -math.log(torch.finfo(dtype).smallest_normal) * 2 / 3


def without_negligible(
    call: Call, bias: Tensor, mask: Tensor | None, q: Tensor, k: Tensor, *, may_change: bool
) -> Tensor:
    """A bias with ``-inf`` for keys that are negligible beside the key with the highest bias.

    A number is added to each row, which changes no weight.

    Parameters
    ----------
    call
        What decides how small a weight is negligible, and the scale of scores.
    bias, mask
        ``(B or 1, H or 1, Q, K)``. The bias may be ``-inf``, also where nothing else hides a key.
    q, k
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``: all keys that these queries see.
    may_change
        Whether the memory of the bias is nobody else's.
    """
    highest = highest_of_rows(bias, mask)
    least, most = (each.item() for each in highest.aminmax())
    depth = negligible_depth(call, max(abs(least), abs(most)), q, k)
    may_change = may_change and not bias.requires_grad
    if most - least > _ALIKE or max(abs(least), abs(most)) > _LARGE:
        # One threshold for all rows: comparing each with its own takes four times as long.
        in_place = may_change and highest.shape[:2] == bias.shape[:2]  # a mask may have more rows
        bias = bias.sub_(highest) if in_place else bias - highest
        least, may_change = 0.0, not bias.requires_grad
    below = torch.threshold_ if may_change else torch.threshold
    return below(bias, least - depth, -torch.inf)


def rounded_depth(call: Call, largest: float, q: Tensor, k: Tensor) -> float:
    """``negligible_depth`` as a multiple of 8, which most calls of a model have in common."""
    depth = negligible_depth(call, largest, q, k)
    return 8.0 * math.ceil(depth / 8) if math.isfinite(depth) else math.inf


@torch.no_grad()
def negligible_depth(call: Call, largest: float, q: Tensor, k: Tensor) -> float:
    """How far below another one of its row a bias must be for its key to be negligible.

    The score of the key with the other bias is at least that bias less the largest score without
    bias. Those of all others are at most their bias and as much. ``largest`` is the largest
    absolute value of the other biases.
    """
    score = max_score(call, q, k).item()
    # Norms of D channels and their products take 2 D + 20 roundings of the score, and the bias 8.
    rounding = torch.finfo(call.dtype).eps * ((q.shape[3] + 18) * score + 8 * largest)
    margin = entry_margin(call, math.log(k.shape[2]))
    depth: float = 2 * score + rounding + margin
    return depth
