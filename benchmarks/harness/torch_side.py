"""PyTorch as ``gpu_check.py`` asks for it: checks, variants and sizes of one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import posenc_torch
from harness import record, right
from harness.clock import Budget
from harness.right import Check, Row
from harness.speed import Settings
from harness.torch_checks import COMPILED, Checked
from harness.torch_speed import Speed
from harness.torch_variants import Inputs, of_this_library, peers, yardsticks

# Those that goals speak of first; from 16384 on of one example, which compiles no kernel anew.
_LENGTHS = (16384, 65536, 131072, 32768, 4096, 8192, 1024, 2048)


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

    compiled = COMPILED

    def __init__(self, device: str, *, quick: bool, compiles: int | None) -> None:
        self._device, self._quick = device, quick
        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU; --device cpu --quick is a dry run")
        usual = 30 if device == "cuda" and not quick else 2
        self.compiles = usual if compiles is None else compiles
        self.framework = Checked(device, compiles=self.compiles > 0)
        if self.compiles == 0:
            self.compiled = ()
        self.scale = 0.5 if quick else 1.0
        self.name = record.slug(str(self.device()["name"]))

    def device(self) -> dict[str, Any]:
        """What it is."""
        if self._device == "cpu":
            return {"name": "cpu", "threads": torch.get_num_threads()}
        found = torch.cuda.get_device_properties(0)
        return {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory": found.total_memory,
        }

    def versions(self) -> dict[str, Any]:
        """Of what PyTorch was built with."""
        return {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}

    def auto(self) -> dict[str, Any]:
        """Which implementation serves each scheme by default, and why not the others."""
        inputs = Inputs(1, 16, 1024, 128, torch.bfloat16, self._device)
        return {
            name: posenc_torch.explain(
                *inputs.tokens, scheme, inputs.params(name, learns=True), causal=True
            )
            for name, scheme in inputs.schemes.items()
        }

    def absent(self) -> dict[str, str]:
        """Paths that nothing on this device can take, and why: there are none."""
        return {}

    def plan(self) -> list[Check]:
        """All checks, in order."""
        stages = 3 if self._quick else right.STAGES
        return right.plan(self.framework, self.compiled, stages)

    def speed(self, budget: Budget) -> Iterator[Row]:
        """All timings."""
        sizes: dict[str, Any] = {"heads": 16, "dim": 128, "tokens": 16384, "lengths": _LENGTHS}
        if self._quick:
            sizes = {"heads": 4, "dim": 64, "tokens": 1024, "lengths": (512, 256), "rounds": (3, 3)}
        settings = Settings(self._device, "bfloat16", **sizes)
        return Speed(settings, [*yardsticks(), *of_this_library(), *peers()], budget).rows()
