"""Exponentials of scores on a CPU, without subnormal numbers.

PyTorch's ``exp`` on CPUs is that of MKL, which takes 13 times as long where a result is below the
smallest normal number, and 40 times where it is subnormal. So do scores that a mask hides, and keys
far down a bias.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posenc_torch.tracing import is_traced, is_transformed

_KEYS = 2.0**26  # a weight divided by the sum of so many weights is still a normal number


def exp(x: Tensor) -> Tensor:
    """``exp(x)`` of scores less the highest one; 0 below ``2**-100`` in float32."""
    plain = type(x) is Tensor and x.device.type == "cpu"
    if not plain or torch.compiler.is_compiling() or is_traced() or is_transformed():
        return torch.exp(x)
    if x.requires_grad and torch.is_grad_enabled():
        found: Tensor = _Exp.apply(x)  # type: ignore[no-untyped-call]  # torch annotates no apply
        return found
    return _exp(x)


def exp_(x: Tensor) -> Tensor:
    """The same in the memory of ``x``, a plain tensor on a CPU."""
    return _exp(x, out=x)


def _exp(x: Tensor, out: Tensor | None = None) -> Tensor:
    least = torch.finfo(x.dtype).smallest_normal * _KEYS
    found = torch.clamp(x, min=math.log(least), out=out).exp_()
    return torch.threshold_(found, 1.001 * least, 0.0)  # the exponential of a logarithm is rounded


class _Exp(torch.autograd.Function):
    """Its gradient is itself. With two operations more, the gradient would take two passes more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = _exp(x)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, d_found: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        d_x: Tensor = d_found * found
        return d_x
