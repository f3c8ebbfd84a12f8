"""PyTorch, eager: its calls are timed by events on a GPU, and by a clock on a CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import posenc_torch
from harness.clock import Sample
from harness.run import STEP, Arrays, Function, Gradients, Ready, Runner, Shape, several
from harness.torch_clock import Clock, Stage

_AHEAD = 50.0  # milliseconds, at most, that a device waits until all work is queued


class FrameworkRunner(Runner):
    """PyTorch on a CPU or a GPU."""

    name = "torch"
    backend = posenc_torch

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device)
        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU; --device cpu --quick is a dry run")
        self.clock = Clock(torch.device(self.device))
        # Two lengths: kernels are then compiled for any length. From 1024 keys on, negligible
        # blocks are looked for, which compiles too.
        self.warm_lengths = (1280, 1408) if self.on_gpu else (1280,)

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device == "cuda"

    def xp(self) -> Any:
        return importlib.import_module("array_api_compat.torch")

    def without_positions(self, q: Any, k: Any, v: Any, causal: bool = True) -> Any:
        return sdpa(q, k, v, is_causal=causal)

    def begin(self, threads: int) -> Runner:
        torch.set_num_threads(threads)
        return self

    def array(self, value: np.ndarray[Any, Any]) -> Tensor:
        return torch.tensor(value, device=self.device)

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        return array.detach().cpu().numpy()

    def leaf(self, array: Tensor) -> Tensor:
        # That of a module asks for gradients already.
        return array if array.requires_grad else array.detach().requires_grad_()

    def normal(self, seed: int, shape: Shape, dtype: str) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        kind = getattr(torch, dtype)
        return torch.randn(shape, generator=generator, device=self.device, dtype=kind)

    def forward(self, function: Function, arrays: Arrays) -> Ready:
        # On a CPU FlexAttention refuses tensors that ask for gradients, recorded or not.
        return _Ready(self, function, {name: a.detach() for name, a in arrays.items()})

    def step(
        self, function: Function, arrays: Arrays, learned: Sequence[str], d_out: Gradients
    ) -> Ready:
        leaves = {name: self.leaf(arrays[name]) for name in learned}
        return _Step(self, function, {**arrays, **leaves}, learned, d_out)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False)

    def reset(self) -> None:
        if "torch._dynamo" in sys.modules:  # it takes a second to import
            torch._dynamo.reset()

    def check(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def free(self) -> float:
        return torch.cuda.mem_get_info()[0] if self.on_gpu else super().free()

    def release(self) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()

    def out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def describe(self) -> dict[str, Any]:
        if not self.on_gpu:
            return {"name": "cpu", "threads": torch.get_num_threads()}
        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
        }

    def versions(self) -> dict[str, Any]:
        return {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


class _Ready(Ready):
    """A forward pass that saves nothing for gradients."""

    kind, seconds = "forward", MappingProxyType({})

    def __init__(
        self,
        runner: FrameworkRunner,
        function: Function,
        arrays: dict[str, Tensor],
    ) -> None:
        self._runner, self._function, self._arrays = runner, function, arrays
        self._ahead = 0.0

    def __call__(self) -> Any:
        with torch.no_grad():
            return self._function(self._arrays)

    def stages(self) -> list[Stage]:
        """What is timed; each receives the result of the one before."""
        return [("forward", lambda _: self())]

    def answers(self) -> tuple[list[Any], dict[str, Any]]:
        return several(self()), {}

    def peak_memory(self) -> int:
        if self._runner.on_gpu:
            return self._runner.clock.peak(self)
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self()
        events = profiler.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        return max(0, *np.cumsum([change for _, change in sorted(changes)]).tolist())

    def first(self) -> tuple[float, dict[str, Any]]:
        stages, kind = self.stages(), self.kind
        sample, used, waits = self._runner.clock.first(stages)
        self._ahead = min(_AHEAD, 1.5 * sample["host"])
        device = sum(ms for name, ms in sample.items() if name != "host")
        return device + sample["host"], {
            f"bytes of {kind}": used,
            f"{kind} makes the host wait": waits,
            f"wall of {kind}": self._runner.clock.wall(stages, device),
        }

    def sample(self) -> Sample:
        if not self._runner.on_gpu:
            # Caches and memory are then those of the same call, as in a loop of them. A GPU's
            # caches are flushed.
            self._runner.clock.run(self.stages())
        sample = self._runner.clock.run(self.stages(), self._ahead)
        host = sample.pop("host")
        return sample | {self.kind: sum(sample.values()), f"host of {self.kind}": host}


class _Step(_Ready):
    """A forward pass that saves what gradients need, and the backward pass."""

    kind = STEP

    def __init__(
        self,
        runner: FrameworkRunner,
        function: Function,
        arrays: dict[str, Tensor],
        learned: Sequence[str],
        d_out: Gradients,
    ) -> None:
        super().__init__(runner, function, arrays)
        self._names, self._leaves = list(learned), [arrays[name] for name in learned]
        self._make, self._d_out = d_out, None

    def __call__(self) -> Any:
        out = self._function(self._arrays)
        return out, self._backward(out)

    def stages(self) -> list[Stage]:
        return [("forward", lambda _: self._function(self._arrays)), ("backward", self._backward)]

    def answers(self) -> tuple[list[Any], dict[str, Any]]:
        out, gradients = self()
        return [a.detach() for a in several(out)], dict(zip(self._names, gradients, strict=True))

    def sample(self) -> Sample:
        sample = super().sample()
        del sample["forward"]  # it is timed where nothing is saved
        return sample

    def _backward(self, out: Any) -> Sequence[Tensor]:
        if self._d_out is None:
            self._d_out = self._gradients(several(out))
        grads = self._d_out if isinstance(out, tuple | list) else self._d_out[0]
        return torch.autograd.grad(out, self._leaves, grads, allow_unused=True)

    def _gradients(self, out: list[Tensor]) -> list[Tensor]:
        """Gradients of the results, made at the first call."""
        if not any(a.requires_grad for a in out):
            raise NotImplementedError("the result does not depend on floating arrays")
        return list(map(self._runner.converted, self._make([tuple(a.shape) for a in out])))
