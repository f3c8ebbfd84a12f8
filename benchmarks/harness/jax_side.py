"""JAX as ``gpu_check.py`` asks for it: checks, variants and sizes of one device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX is imported

import jax
import jax.numpy as jnp

import posenc
import posenc_jax
from harness import record, right
from harness.clock import Budget
from harness.jax_checks import Checked
from harness.jax_speed import Speed
from harness.jax_variants import Inputs, of_this_library, peers, yardsticks
from harness.right import Check, Row
from harness.speed import Settings

# Those that goals speak of first.
_LENGTHS = (8192, 65536, 131072, 16384, 4096, 32768, 1024, 2048)


class Side:
    """One device.

    Attributes
    ----------
    framework, compiled, compiles
        The framework of the checks, its implementations that compile, and how often each part may.
    name
        Of the device, for a file.
    scale
        Of the lengths of checks.
    """

    compiled = posenc_jax.IMPLEMENTATIONS

    def __init__(self, device: str, *, quick: bool, compiles: int | None) -> None:
        self._device, self._quick = device, quick
        if device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        elif jax.default_backend() != "gpu":
            raise SystemExit("JAX sees no GPU; --device cpu --quick is a dry run")
        usual = 12 if quick else 1000 if device == "cuda" else 100
        self.compiles = usual if compiles is None else compiles
        self.framework = Checked(quickly=device == "cpu")
        self.scale = 0.5 if quick else 1.0
        self.name = record.slug(str(self.device()["name"]))

    def device(self) -> dict[str, Any]:
        """What it is."""
        if self._device == "cpu":
            return {"name": "cpu", "threads": os.cpu_count()}
        found = jax.local_devices()[0]
        return {
            "name": found.device_kind,
            "capability": str(getattr(found, "compute_capability", "")),
            "multiprocessors": getattr(found, "core_count", None),
            "memory": (found.memory_stats() or {}).get("bytes_limit"),
        }

    def versions(self) -> dict[str, Any]:
        """Of what JAX runs on."""
        return {"platform": jax.local_devices()[0].client.platform_version}

    def auto(self) -> dict[str, Any]:
        """Which implementation serves each scheme by default, and why not the others."""
        inputs = Inputs(1, 16, 1024, 128, "bfloat16")
        return {
            name: posenc_jax.explain(*inputs.tokens, scheme, inputs.params(name), causal=True)
            for name, scheme in inputs.schemes.items()
        }

    def absent(self) -> dict[str, str]:
        """Paths that nothing on this device can take, and why: they refuse plain attention."""
        found = {}
        plain = [jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)] * 3
        for implementation in posenc_jax.IMPLEMENTATIONS:
            call = partial(
                posenc_jax.attention,
                scheme=posenc.ALiBi(4),
                causal=True,
                implementation=implementation,
            )
            try:
                jax.eval_shape(call, *plain)
            except NotImplementedError as refused:
                found[implementation] = right.said(refused)
        return found

    def plan(self) -> list[Check]:
        """All checks, in order, of the implementations that are there."""
        stages = 3 if self._quick else right.STAGES
        absent = self.absent()
        found = right.plan(self.framework, self.compiled, stages)
        return [check for check in found if check.implementation not in absent]

    def speed(self, budget: Budget) -> Iterator[Row]:
        """All timings."""
        sizes: dict[str, Any] = {"heads": 16, "dim": 128, "tokens": 16384, "lengths": _LENGTHS}
        if self._quick:
            sizes = {"heads": 4, "dim": 64, "tokens": 512, "lengths": (256, 128), "rounds": (3, 3)}
        settings = Settings(self._device, "bfloat16", **sizes)
        return Speed(settings, [*yardsticks(), *of_this_library(), *peers()], budget).rows()
