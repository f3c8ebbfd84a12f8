"""What is installed, and every way to attention behind one face. Tests hold NumPy arrays."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from posenc.testing import AttentionCase, Framework, frameworks

HAS = {name: importlib.util.find_spec(name) is not None for name in ("torch", "jax")}
FRAMEWORKS = frameworks()
MISSING = [
    pytest.param(None, id=name, marks=pytest.mark.skip(reason=f"{name} is not installed"))
    for name, here in HAS.items()
    if not here
]


@dataclass(frozen=True)
class Route:
    """One implementation of one framework."""

    framework: Framework
    implementation: str

    def __str__(self) -> str:
        return f"{self.framework}-{self.implementation}"

    def attend(self, scheme, tensors, params, *, dtype="float32", **options) -> np.ndarray:
        """Attention of tensors cast to ``dtype``, as float64."""
        problem = AttentionCase(scheme, tensors, params, options)
        return problem.attend(self.framework, self.implementation, dtype=dtype)

    def gradients(self, scheme, tensors, params, d_out, *, dtype="float32", **options) -> Any:
        """The result, and gradients of ``sum(result * d_out)`` by name."""
        problem = AttentionCase(scheme, tensors, params, options)
        return problem.gradients(self.framework, self.implementation, d_out, dtype=dtype)


def route(framework: str, implementation: str) -> Route:
    """A route by its names."""
    return Route(FRAMEWORKS[framework], implementation)


# Served here in few of the calls that are tried or not at all, and with tests of their own.
PARTIAL = {"folded", "pallas"}
ROUTES = [
    pytest.param(Route(FRAMEWORKS[name], implementation), id=f"{name}-{implementation}")
    for name in ("numpy", "torch", "jax")
    if name in FRAMEWORKS
    for implementation in FRAMEWORKS[name].implementations
    if implementation not in PARTIAL
] + MISSING
FUSED = [p for p in ROUTES if p.values[0] is None or p.values[0].framework.differentiable]
