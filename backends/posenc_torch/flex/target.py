"""For which kind of device FlexAttention's compiler makes a kernel: C++ for a CPU, or Triton."""

from __future__ import annotations

from torch import Tensor

KINDS = ("cpu",)  # of devices whose kernels are C++


def is_cpu(array: Tensor) -> bool:
    """Whether the kernel that takes an array is the one for a CPU, which has limits of its own."""
    return array.device.type in KINDS
