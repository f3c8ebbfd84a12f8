"""One device for ``gpu_check.py``: its checks, its timings and what it reaches."""

from __future__ import annotations

import importlib
from typing import Any

from harness import correctness, record
from harness.clock import Budget
from harness.correctness import Check
from harness.ratios import GOALS
from harness.run import FORWARD, Runner, load, params_of
from harness.speed import Settings, Timing
from harness.variants import Inputs

# Lengths that have goals come first.
_LENGTHS = (8192, 65536, 131072, 16384, 4096, 32768, 1024, 2048)


class Device:
    """A framework on a device.

    Attributes
    ----------
    runner
        What runs it.
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

    def __init__(
        self, framework: str, device: str, *, quick: bool, compiles: int | None, seed: int = 0
    ) -> None:
        self._quick, self.runner = quick, load(framework, device)
        self._checks, self._variants = (
            importlib.import_module(f"harness.{framework}_{part}")
            for part in ("checks", "variants")
        )
        default = self._checks.compilations(device, quick=quick)
        self.compiles: int = default if compiles is None else compiles
        self.framework, self.compiled = self._checks.checked(device, compiles=self.compiles > 0)
        self.scale = 0.5 if quick else 1.0
        self.name, self.goals = record.slug(str(self.runner.describe()["name"])), GOALS[framework]
        sizes: dict[str, Any] = {"heads": 16, "dim": 128, "lengths": _LENGTHS}
        if quick:
            sizes = {"heads": 4, "dim": 64, "lengths": (512, 256), "rounds": (3, 3)}
        self.settings = Settings("bfloat16", **sizes, seed=seed)

    def describe(self) -> dict[str, Any]:
        """Name, what distinguishes the device, and what it reaches."""
        size = 512 if self._quick else 8192
        return self.runner.describe() | rates(self.runner, size)

    def auto(self) -> dict[str, Any]:
        """The implementation that each scheme gets by default, and why not the others."""
        inputs = Inputs(self.runner, 16, self.settings.lengths[0], 128, "bfloat16")
        tokens, leaf = inputs.tokens.values(), self.runner.leaf
        return {
            name: self.runner.backend.explain(
                *map(leaf, tokens), scheme,
                {n: leaf(a) for n, a in params_of(inputs.params(name)).items()}, causal=True,
            )
            for name, scheme in inputs.schemes.items()
        }  # fmt: skip

    def absent(self) -> dict[str, str]:
        """Implementations that refuse plain attention on this device, and why."""
        reasons: dict[str, str] = self._checks.absent()
        return reasons

    def plan(self) -> list[Check]:
        """All checks, in order, of the implementations that can run."""
        stages, absent = 3 if self._quick else correctness.STAGES, self.absent()
        checks = correctness.plan(self.framework, self.compiled, stages, first=self._checks.FIRST)
        return [check for check in checks if check.implementation not in absent]

    def speed(self, budget: Budget) -> Timing:
        """The timings."""
        few, own = self.settings.lengths[:2], self._variants
        variants = [
            *own.baselines(), *own.of_this_library(few=few), *own.trials(few), *own.peers()
        ]  # fmt: skip
        return Timing(self.runner, self.settings, variants, budget)


def rates(runner: Runner, size: int) -> dict[str, float]:
    """What a device reaches: a product of square matrices, and an array read and written."""
    a, b = (runner.normal(seed, (size, size), "bfloat16") for seed in (0, 1))
    long = runner.normal(2, (4 * size**2,), "float32")
    product = _fastest(runner, lambda given: given["a"] @ given["b"], {"a": a, "b": b})
    copy = _fastest(runner, lambda given: -given["long"], {"long": long})
    tera, giga = 2e-9 * size**3 / product, 2e-6 * 16 * size**2 / copy
    return {
        "product, TFLOP/s": float(f"{tera:.3g}"),
        "copy, GB/s read and written": float(f"{giga:.3g}"),
    }


def _fastest(runner: Runner, function: Any, arrays: dict[str, Any]) -> float:
    ready = runner.ready(function, arrays, FORWARD)
    ready.first()
    return min(ready.sample()[FORWARD] for _ in range(5))
