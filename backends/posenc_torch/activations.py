"""PyTorch's own softplus, exact in every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

_LINEAR_FROM = 40.0  # exp(-40) is less than a rounding in float64; PyTorch's default is 20


def softplus(z: Tensor) -> Tensor:
    """``ln(1 + exp(z))``."""
    if type(z).__name__ == "DTensor":  # split by heads, PyTorch 2.13 has no gradient of softplus
        return torch.logaddexp(torch.zeros_like(z), z)
    if torch.compiler.is_compiling():
        # Its compiler expects another layout of the gradient than the operation returns for
        # transposed memory: "view size is not compatible". A vector has one layout alone.
        return torch.nn.functional.softplus(z.flatten(), threshold=_LINEAR_FROM).reshape(z.shape)
    return torch.nn.functional.softplus(z, threshold=_LINEAR_FROM)
