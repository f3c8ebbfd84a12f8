"""The device that kernels are compiled for: the default one, or one that is not present."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes
    ----------
    platform
        ``"cpu"``, ``"gpu"`` or ``"tpu"``.
    capability
        Compute capability of an NVIDIA GPU, such as ``"9.0"``.
    interpreted
        Whether kernels are interpreted on the CPU instead: slow, for tests.
    """

    platform: str
    capability: str = ""
    interpreted: bool = False


_override: ContextVar[Target | None] = ContextVar("posenc_jax_target", default=None)


def target() -> Target:
    """The device that kernels are compiled for."""
    override = _override.get()
    if override is not None:
        return override
    device = jax.devices()[0]
    return Target(jax.default_backend(), str(getattr(device, "compute_capability", "")))


@contextmanager
def targeting(override: Target) -> Iterator[None]:
    """Compile kernels for a device that is not present, or interpret them."""
    token = _override.set(override)
    try:
        yield
    finally:
        _override.reset(token)
