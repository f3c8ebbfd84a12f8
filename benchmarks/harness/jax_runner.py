"""JAX for ``gpu_check.py``: checks, variants and sizes of one device."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX is imported

import jax
import jax.numpy as jnp

import posenc
import posenc_jax
from harness import correctness, record
from harness.clock import Budget
from harness.correctness import Check
from harness.jax_checks import Checked
from harness.jax_speed import Program, Speed
from harness.jax_variants import Inputs, baselines, of_this_library, peers
from harness.ratios import GOALS
from harness.speed import Settings, rates

# Lengths that have goals come first.
_LENGTHS = (8192, 65536, 131072, 16384, 4096, 32768, 1024, 2048)


class FrameworkRunner:
    """One device.

    Attributes
    ----------
    framework, compiled, compiles
        The framework of the checks, its implementations that compile, and how many compilations
        each part may use.
    name
        Name of the device, for a file name.
    scale
        Factor on the lengths of checks.
    goals, settings
        Of the timings.
    """

    goals = GOALS["jax"]
    compiled = posenc_jax.IMPLEMENTATIONS

    def __init__(self, device: str, *, quick: bool, compiles: int | None) -> None:
        self._device, self._quick = device, quick
        if device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        elif jax.default_backend() != "gpu":
            raise SystemExit("JAX sees no GPU; --device cpu --quick is a dry run")
        default = 12 if quick else 1000 if device == "cuda" else 100
        self.compiles = default if compiles is None else compiles
        self.framework = Checked(quickly=device == "cpu")
        self.scale = 0.5 if quick else 1.0
        self.name = record.slug(str(self.device()["name"]))
        sizes: dict[str, Any] = {"heads": 16, "dim": 128, "lengths": _LENGTHS}
        if quick:
            sizes = {"heads": 4, "dim": 64, "lengths": (256, 128), "rounds": (3, 3)}
        self.settings = Settings(device, "bfloat16", **sizes)

    def device(self) -> dict[str, Any]:
        """Name, and what distinguishes the device."""
        if self._device == "cpu":
            return {"name": "cpu", "threads": os.cpu_count()}
        device = jax.local_devices()[0]
        return {
            "name": device.device_kind,
            "capability": str(getattr(device, "compute_capability", "")),
            "multiprocessors": getattr(device, "core_count", None),
            "memory": (device.memory_stats() or {}).get("bytes_limit"),
        }

    def ceilings(self) -> dict[str, float]:
        """What the device reaches: a product of matrices, and a copy."""
        size = 512 if self._quick else 8192
        keys = jax.random.split(jax.random.key(0), 3)
        a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys[:2])
        long = jax.random.normal(keys[2], (size**2 * 4,))
        work = {"product": (jnp.matmul, (a, b)), "copy": (jnp.negative, (long,))}
        ms = {}
        for name, (function, arguments) in work.items():
            program = Program(jax.jit(function).lower(*arguments).compile(), arguments, calls=5)
            ms[name] = min(program.sample()[0] for _ in range(3))
        return rates(size, ms["product"], long.nbytes, ms["copy"])

    def versions(self) -> dict[str, Any]:
        """Versions of what JAX runs on."""
        return {"platform": jax.local_devices()[0].client.platform_version}

    def auto(self) -> dict[str, Any]:
        """The implementation that each scheme gets by default, and why not the others."""
        inputs = Inputs(16, self.settings.lengths[0], 128, "bfloat16")
        return {
            name: posenc_jax.explain(*inputs.tokens, scheme, inputs.params(name), causal=True)
            for name, scheme in inputs.schemes.items()
        }

    def absent(self) -> dict[str, str]:
        """Implementations that refuse plain attention on this device, and why."""
        reasons = {}
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
                reasons[implementation] = record.first_line(refused)
        return reasons

    def plan(self) -> list[Check]:
        """All checks, in order, of the implementations that can run."""
        stages = 3 if self._quick else correctness.STAGES
        absent = self.absent()
        # The only one that runs kernels of this library.
        checks = correctness.plan(self.framework, self.compiled, stages, first=("pallas",))
        return [check for check in checks if check.implementation not in absent]

    def speed(self, budget: Budget) -> Speed:
        """The timings."""
        own = of_this_library(few=self.settings.lengths[:2])
        return Speed(self.settings, [*baselines(), *own, *peers()], budget)
