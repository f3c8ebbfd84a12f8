"""NumPy, whose implementation is the reference and which has no gradients."""

from __future__ import annotations

import tracemalloc
from types import MappingProxyType
from typing import Any

import array_api_compat.numpy
import numpy as np

import posenc
from harness.run import FORWARD, Arrays, Function, Ready, Runner, several


class FrameworkRunner(Runner):
    """NumPy on this machine."""

    name = "numpy"
    backend = posenc
    kinds = (FORWARD,)
    implementations = ("reference",)

    def xp(self) -> Any:
        return array_api_compat.numpy

    def without_positions(self, q: Any, k: Any, v: Any, causal: bool = True) -> Any:
        raise NotImplementedError("NumPy has no attention")

    def array(self, value: np.ndarray[Any, Any]) -> Any:
        return value

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def forward(self, function: Function, arrays: Arrays) -> Ready:
        return _Ready(function, arrays)


class _Ready(Ready):
    kind, seconds = FORWARD, MappingProxyType({})

    def __init__(self, function: Function, arrays: Arrays) -> None:
        self._function, self._arrays = function, arrays

    def __call__(self) -> Any:
        return self._function(self._arrays)

    def answers(self) -> tuple[list[Any], dict[str, Any]]:
        return several(self()), {}

    def peak_memory(self) -> int:
        tracemalloc.start()
        self()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak
