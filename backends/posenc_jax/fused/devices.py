"""What each kind of device offers: which calls its kernels serve, and the kernels."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import ClassVar

from posenc.backend import Call, PositionScheme
from posenc_jax.fused.gradients import Kernels
from posenc_jax.fused.reads import BiasReads
from posenc_jax.fused.target import Target

# Imported on first use: each needs its own version of JAX. Each has an instance, ``DEVICE``.
_MODULES = {"gpu": "posenc_jax.fused.mosaic_gpu", "tpu": "posenc_jax.fused.tpu"}
PLATFORMS = tuple(_MODULES)


class Device(ABC):
    """The kernels for one kind of device. Each ``unsupported`` method gives a reason, or None."""

    reads_far: ClassVar[bool] = False
    """Whether its kernels read ``Operands.far``."""

    @abstractmethod
    def unsupported(self, target: Target) -> str | None:
        """Why no kernel runs on this target, or with this version of JAX."""

    @abstractmethod
    def unsupported_call(self, call: Call) -> str | None:
        """Why no kernel takes the shapes or dtypes of a call."""

    @abstractmethod
    def unsupported_bias(self, scheme: PositionScheme, reads: BiasReads) -> str | None:
        """Why no kernel can compute a scheme's elementwise bias, which reads that."""

    @abstractmethod
    def block(self, call: Call) -> int:
        """Queries per block, and keys per block."""

    @abstractmethod
    def kernels(self, *, interpreted: bool) -> Kernels:
        """The kernels."""


def device_for(target: Target) -> Device:
    """The kernels for a target whose platform is one of ``PLATFORMS``."""
    device = importlib.import_module(_MODULES[target.platform]).DEVICE
    assert isinstance(device, Device)
    return device
