"""A small network of one number: by matrix products, or as what it is, a broken line.

Between two neighbouring numbers at which a unit begins or ends, the network is ``a x + b``. To find
the piece of a number and read its ``a`` and ``b`` takes half of the time of 32 units. The gradient
would be sums over the numbers of each piece, which take longer than products do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from posenc_torch.tracing import may_read

_UNITS = 8  # at a time: about as much memory as the result takes


def network(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor | None:
    """``w2 relu(w1 x + b1)``, ``(B or 1, H, Q, K)`` of ``x (B or 1, 1, Q, K)``; on a CPU alone.

    A GPU may multiply matrices in TF32.
    """
    if x.ndim != 4 or x.device.type != "cpu" or is_traceable_wrapper_subclass(w2):
        return None
    learns = torch.is_grad_enabled() and any(a.requires_grad for a in (x, w1, b1, w2))
    if x.shape[0] == 1 and may_read(x) and not learns:
        return _broken_line(x, w1, b1, w2)
    flat, total = x.flatten(2), None
    of_units = (torch.split(w, _UNITS) for w in (w1[:, None], b1[:, None], w2.mT))
    for first, offset, last in zip(*of_units, strict=True):
        units = torch.relu(torch.addcmul(offset, first, flat))
        heads = last.mT.expand(x.shape[0], -1, -1)
        total = heads @ units if total is None else torch.baddbmm(total, heads, units)
    assert total is not None
    bias: Tensor = total.reshape(x.shape[0], -1, *x.shape[2:])
    return bias


def _broken_line(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """The same of ``x (1, 1, Q, K)``, piece by piece."""
    same = w1 == 0  # everywhere
    ends, order = torch.sort(torch.where(same, torch.inf, -b1 / w1))
    rank = torch.argsort(order)  # of the end of each unit
    piece = torch.arange(len(w1) + 1, device=x.device)[:, None]
    rises, falls = (w1 > 0) & (piece > rank), (w1 < 0) & (piece <= rank)
    active = (rises | falls | (same & (b1 > 0))).to(x.dtype)
    a, b = (w2 * w1) @ active.mT, (w2 * b1) @ active.mT
    flat = x.flatten()
    at = torch.bucketize(flat, ends, out_int32=True)
    bias = a.index_select(1, at).mul_(flat).add_(b.index_select(1, at))
    return bias.reshape(1, -1, *x.shape[2:])
