"""JAX, compiled: each call is one program of ``jax.jit``, with its arrays as arguments."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import posenc_jax
from harness.clock import Sample
from harness.run import FORWARD, STEP, Arrays, Function, Gradients, Ready, Runner, Shape, several

_SAMPLE, _CALLS = 20.0, 50  # milliseconds per sample, and at most so many calls


class FrameworkRunner(Runner):
    """JAX on a CPU, a GPU or its default device."""

    name = "jax"
    backend = posenc_jax
    axes = 0, 2, 1, 3
    workers = min(8, os.cpu_count() or 1)
    compiles = True

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device)
        if device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        elif device is not None and jax.default_backend() != "gpu":
            raise SystemExit("JAX sees no GPU; --device cpu --quick is a dry run")

    def xp(self) -> Any:
        return jnp

    def without_positions(self, q: Any, k: Any, v: Any, causal: bool = True) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    def begin(self, threads: int) -> Runner:
        os.environ["NPROC"] = str(threads)  # XLA reads it when the first array is made
        return self

    def array(self, value: np.ndarray[Any, Any]) -> Array:
        return jnp.asarray(value)

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def normal(self, seed: int, shape: Shape, dtype: str) -> Array:
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        return draw(self.key(seed), shape, jnp.dtype(dtype))

    def forward(self, function: Function, arrays: Arrays) -> Ready:
        return _Ready(self, FORWARD, lambda own: several(function(own)), (arrays,))

    def step(
        self, function: Function, arrays: Arrays, learned: Sequence[str], d_out: Gradients
    ) -> Ready:
        shapes = [a.shape for a in several(jax.eval_shape(function, arrays))]
        leaves = {name: arrays[name] for name in learned}
        fixed = {name: a for name, a in arrays.items() if name not in leaves}

        def step(leaves: Arrays, fixed: Arrays, d_out: list[Array]) -> tuple[list[Array], Any]:
            out, pull = jax.vjp(lambda own: several(function({**fixed, **own})), leaves)
            return out, pull(d_out)[0]

        gradients = list(map(self.converted, d_out(shapes)))
        return _Ready(self, STEP, step, (leaves, fixed, gradients))

    def key(self, seed: int) -> Array:
        """A key of random numbers."""
        return jax.random.key(seed)

    def jitted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # Without the search for the fastest products, which takes longer than one call.
        return jax.jit(function, compiler_options={"xla_gpu_autotune_level": 0})

    def wide(self) -> AbstractContextManager[Any]:
        return jax.enable_x64(True)

    def reset(self) -> None:
        jax.clear_caches()

    def check(self) -> None:
        jax.block_until_ready(jnp.zeros(8) + 1)

    def free(self) -> float:
        stats = self.stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else super().free()

    def out_of_memory(self, error: Exception) -> bool:
        return "RESOURCE_EXHAUSTED" in str(error)

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device == "cuda"

    def stats(self) -> dict[str, int]:
        """Statistics of the device's allocator; empty on a CPU."""
        return (jax.local_devices()[0].memory_stats() if self.on_gpu else None) or {}

    def describe(self) -> dict[str, Any]:
        if not self.on_gpu:
            return super().describe()
        device = jax.local_devices()[0]
        return {
            "name": device.device_kind,
            "capability": str(getattr(device, "compute_capability", "")),
            "multiprocessors": getattr(device, "core_count", None),
            "memory": self.stats().get("bytes_limit"),
        }

    def versions(self) -> dict[str, Any]:
        return {"platform": jax.local_devices()[0].client.platform_version}


class _Ready(Ready):
    """A program with its arguments, called ``calls`` times per sample."""

    def __init__(
        self,
        runner: FrameworkRunner,
        kind: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        self.kind, self.calls, self._runner, self._arguments = kind, 1, runner, arguments
        begun = time.perf_counter()
        self._lowered = jax.jit(function).lower(*arguments)
        self.seconds = {"trace": _since(begun)}
        self._program: Any = None

    def compile(self) -> None:
        self.program()

    def program(self) -> Any:
        """What XLA compiled."""
        if self._program is None:
            begun = time.perf_counter()
            self._program = self._lowered.compile()
            self.seconds["compile"] = _since(begun)
        return self._program

    def __call__(self) -> Any:
        return jax.block_until_ready(self.program()(*self._arguments))

    def answers(self) -> tuple[list[Any], dict[str, Any]]:
        return self() if self.kind == STEP else (self(), {})

    def peak_memory(self) -> int | None:
        """Bytes of temporaries and results as the compiler reports them; None if it does not."""
        memory = self.program().memory_analysis()
        if memory is None:
            return None
        return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)

    def counts(self) -> dict[str, int]:
        return {"XLA instructions": self.program().as_text().count(" = ")}

    def first(self) -> tuple[float, dict[str, Any]]:
        ms = self.sample()[self.kind]
        if self._runner.on_gpu:  # a CPU would run several at a time
            self.calls = max(1, min(_CALLS, round(_SAMPLE / ms)))
        return ms * self.calls, {
            f"calls of {self.kind}": self.calls,
            "peak of the process so far": self._runner.stats().get("peak_bytes_in_use"),
        }

    def sample(self) -> Sample:
        """All calls are queued at once.

        The device waits for the host only if queueing a call takes longer than running it.
        """
        program, begun, result = self.program(), time.perf_counter(), None
        for _ in range(self.calls):
            result = program(*self._arguments)
        queued = time.perf_counter()
        jax.block_until_ready(result)
        ended = time.perf_counter()
        wall, host = (1e3 * (end - begun) / self.calls for end in (ended, queued))
        return {self.kind: wall, f"host of {self.kind}": host}


def _since(begun: float) -> float:
    return round(time.perf_counter() - begun, 3)
