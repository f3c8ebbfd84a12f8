"""PyTorch for the checks: real kernels, TF32 only if asked for, in memory filled with NaN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from posenc_torch.flex.programs import uncompiled
from posenc_torch.testing import Torch

COMPILED = ("flex",)
FIRST: tuple[str, ...] = ()  # compiled implementations that are checked before the others
_NAN_BYTES = 2**28  # bytes


class Checked(Torch):
    """PyTorch on one device; ``compiles=False``: FlexAttention's eager definition."""

    def __init__(self, device: str, compiles: bool) -> None:
        super().__init__(device)
        self._compiles, self._precision = compiles, "highest"

    @contextmanager
    def precision_scope(self, dtypes: Sequence[str]) -> Iterator[None]:
        """Float32 products in full precision, unless in ``tf32``; memory that a kernel does not
        write holds NaN.
        """
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._precision)
        try:
            with warnings.catch_warnings(), nullcontext() if self._compiles else uncompiled():
                warnings.simplefilter("ignore")
                fill_with_nan(self._device)
                yield
        finally:
            torch.set_float32_matmul_precision(precision)

    def check_device(self) -> None:
        """Raise if the device computes nothing any more, as after an illegal address."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def tf32(self) -> Iterator[None]:
        """Inside, float32 products may be rounded to TF32."""
        self._precision = "high"
        try:
            yield
        finally:
            self._precision = "highest"


def compilations(device: str, *, quick: bool) -> int:
    """How many compilations each part may use."""
    return 30 if device == "cuda" and not quick else 2


def checked(device: str, *, compiles: bool) -> tuple[Checked, tuple[str, ...]]:
    """The framework of the checks, and its implementations that compile."""
    return Checked(device, compiles), COMPILED if compiles else ()


def absent() -> dict[str, str]:
    """Implementations that refuse plain attention on this device, and why: none."""
    return {}


def fill_with_nan(device: torch.device) -> None:
    """Fill memory with NaN and free it, so that the next tensors probably get it.

    The allocator's cache is emptied first, because it may hold right results of other
    implementations. It has separate pools for large and small tensors, so both are filled.
    """
    if device.type != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [torch.full((_NAN_BYTES // 4,), torch.nan, device=device)]
    held += [torch.full((2**17,), torch.nan, device=device) for _ in range(64)]
    del held
