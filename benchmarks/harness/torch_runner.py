"""PyTorch for ``gpu_check.py``: checks, variants and sizes of one device."""

from __future__ import annotations

from typing import Any

import torch

import posenc_torch
from harness import correctness, record
from harness.clock import Budget
from harness.correctness import Check
from harness.ratios import GOALS
from harness.speed import Settings, rates
from harness.torch_checks import COMPILED, Checked
from harness.torch_clock import Clock
from harness.torch_speed import Speed
from harness.torch_variants import Inputs, baselines, of_this_library, peers, trials

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

    goals = GOALS["torch"]
    compiled = COMPILED

    def __init__(self, device: str, *, quick: bool, compiles: int | None) -> None:
        self._device, self._quick = device, quick
        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU; --device cpu --quick is a dry run")
        default = 30 if device == "cuda" and not quick else 2
        self.compiles = default if compiles is None else compiles
        self.framework = Checked(device, compiles=self.compiles > 0)
        if self.compiles == 0:
            self.compiled = ()
        self.scale = 0.5 if quick else 1.0
        self.name = record.slug(str(self.device()["name"]))
        sizes: dict[str, Any] = {"heads": 16, "dim": 128, "lengths": _LENGTHS}
        if quick:
            sizes = {"heads": 4, "dim": 64, "lengths": (512, 256), "rounds": (3, 3)}
        self.settings = Settings(device, "bfloat16", **sizes)

    def device(self) -> dict[str, Any]:
        """Name, and what distinguishes the device."""
        if self._device == "cpu":
            return {"name": "cpu", "threads": torch.get_num_threads()}
        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
        }

    def ceilings(self) -> dict[str, float]:
        """What the device reaches: a product of matrices, and a copy."""
        size, clock = (512 if self._quick else 8192), Clock(torch.device(self._device))
        a, b = (
            torch.randn(size, size, device=self._device, dtype=torch.bfloat16) for _ in range(2)
        )
        long = torch.randn(size**2 * 4, device=self._device)
        work = {"product": lambda _: a @ b, "copy": lambda _: long.clone()}
        ms = {
            name: min(clock.run([(name, run)])[name] for _ in range(5))
            for name, run in work.items()
        }
        return rates(size, ms["product"], long.numel() * long.itemsize, ms["copy"])

    def versions(self) -> dict[str, Any]:
        """Versions of what PyTorch was built with."""
        return {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}

    def auto(self) -> dict[str, Any]:
        """The implementation that each scheme gets by default, and why not the others."""
        inputs = Inputs(16, self.settings.lengths[0], 128, torch.bfloat16, self._device)
        return {
            name: posenc_torch.explain(
                *inputs.tokens, scheme, inputs.params(name, learns=True), causal=True
            )
            for name, scheme in inputs.schemes.items()
        }

    def absent(self) -> dict[str, str]:
        """Implementations that refuse plain attention on this device, and why: none."""
        return {}

    def plan(self) -> list[Check]:
        """All checks, in order."""
        stages = 3 if self._quick else correctness.STAGES
        return correctness.plan(self.framework, self.compiled, stages)

    def speed(self, budget: Budget) -> Speed:
        """The timings."""
        few = trials(self.settings.lengths[:2])
        variants = [*baselines(), *of_this_library(), *few, *peers()]
        return Speed(self.settings, variants, budget)
