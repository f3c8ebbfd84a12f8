"""Sides in PyTorch: eager, or both compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import posenc_torch  # noqa: F401  # rotates in the way of PyTorch, once it is imported
from harness.peers.measure import Framework, Shape
from harness.peers.side import Side
from posenc.testing import Host


def set_threads(count: int) -> None:
    """How many threads an operation may use."""
    torch.set_num_threads(count)


class Torch(Framework):
    """PyTorch on a CPU."""

    name = "torch"

    def array(self, value: Host, learns: bool) -> Any:
        tensor = torch.tensor(value)
        return tensor.requires_grad_() if learns else tensor

    def host(self, array: Any) -> Host:
        return array.detach().numpy()

    def forward(self, side: Side, mode: str) -> Callable[[], Sequence[Any]]:
        call, leaves = _compiled(side.call, mode), _arrays(side)

        def run() -> Sequence[Tensor]:
            with torch.no_grad():
                return _several(call(*leaves))

        return run

    def step(
        self, side: Side, mode: str, d_out: Callable[[Sequence[Shape]], Sequence[Any]]
    ) -> Callable[[], Sequence[Any]]:
        call, leaves = _compiled(side.call, mode), _arrays(side)
        gradients: list[Tensor] = []

        def run() -> Sequence[Tensor]:
            out = _several(call(*leaves))
            if not gradients:
                gradients.extend(d_out([tuple(a.shape) for a in out]))
            return *out, *torch.autograd.grad(out, leaves, gradients)

        return run

    def reset(self) -> None:
        if "torch._dynamo" in sys.modules:  # it takes a second to import
            torch._dynamo.reset()


def _compiled(call: Callable[..., Any], mode: str) -> Callable[..., Any]:
    return torch.compile(call, dynamic=False) if mode == "compile" else call


def _arrays(side: Side) -> list[Tensor]:
    return [leaf.array for leaf in side.leaves.values()]


def _several(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
