"""PyTorch's own softplus, exact in every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

_LINEAR_FROM = 40.0  # exp(-40) is less than a rounding in float64; PyTorch's default is 20


def softplus(z: Tensor) -> Tensor:
    """``ln(1 + exp(z))``."""
    return torch.nn.functional.softplus(z, threshold=_LINEAR_FROM)
