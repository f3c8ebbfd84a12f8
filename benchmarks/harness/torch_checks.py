"""PyTorch as checks use it: kernels as they really run, without TF32, in memory that held NaN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from posenc_torch.flex.implementation import uncompiled
from posenc_torch.testing import Torch

COMPILED = ("flex",)
_POISON = 2**28  # bytes


class Checked(Torch):
    """PyTorch on one device; ``compiles=False``: FlexAttention's eager definition."""

    def __init__(self, device: str, compiles: bool) -> None:
        super().__init__(device)
        self._compiles = compiles

    @contextmanager
    def precision_scope(self, dtypes: Sequence[str]) -> Iterator[None]:
        """Float32 is float32, and what a kernel does not write is NaN."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with warnings.catch_warnings(), nullcontext() if self._compiles else uncompiled():
                warnings.simplefilter("ignore")
                poison(self._device)
                yield
        finally:
            torch.set_float32_matmul_precision(precision)


def poison(device: torch.device) -> None:
    """Leave NaN in the memory that the next tensors get, as far as an allocator is asked.

    On a GPU the cache first gives back what it holds, right answers of other implementations among
    it. Large and small tensors come from two pools of it.
    """
    if device.type != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [torch.full((_POISON // 4,), torch.nan, device=device)]
    held += [torch.full((2**17,), torch.nan, device=device) for _ in range(64)]
    del held
