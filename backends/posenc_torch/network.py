"""A small network of one number, by matrix products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_UNITS = 8  # at a time: about as much memory as the result takes


def network(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor | None:
    """``w2 relu(w1 x + b1)``, ``(B or 1, H, Q, K)`` of ``x (B or 1, 1, Q, K)``; on a CPU alone.

    A GPU may multiply matrices in TF32.
    """
    if x.ndim != 4 or x.device.type != "cpu" or is_traceable_wrapper_subclass(w2):
        return None
    flat, total = x.flatten(2), None
    of_units = (torch.split(w, _UNITS) for w in (w1[:, None], b1[:, None], w2.mT))
    for first, offset, last in zip(*of_units, strict=True):
        units = torch.relu(torch.addcmul(offset, first, flat))
        heads = last.mT.expand(x.shape[0], -1, -1)
        total = heads @ units if total is None else torch.baddbmm(total, heads, units)
    assert total is not None
    bias: Tensor = total.reshape(x.shape[0], -1, *x.shape[2:])
    return bias
