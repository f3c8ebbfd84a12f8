"""The device that kernels are for: the default one, or one that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        Of an NVIDIA GPU, as in ``"9.0"``.
    interpreted
        Whether kernels are interpreted on the CPU instead: slow, for tests.
    """

    platform: str
    capability: str = ""
    interpreted: bool = False


_chosen: Target | None = None


def target() -> Target:
    """What kernels are compiled for."""
    if _chosen is not None:
        return _chosen
    device = jax.devices()[0]
    return Target(jax.default_backend(), str(getattr(device, "compute_capability", "")))


@contextmanager
def targeting(chosen: Target) -> Iterator[None]:
    """Kernels for another device: to compile for one that is not here, or to interpret them."""
    global _chosen
    before, _chosen = _chosen, chosen
    try:
        yield
    finally:
        _chosen = before
