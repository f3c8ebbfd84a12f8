"""NumPy, PyTorch and JAX as the benchmarks use them: calls that can be timed, and their memory."""

from __future__ import annotations

import importlib.util
import math
import os
import tracemalloc
from abc import ABC, abstractmethod

import array_api_compat.numpy
import numpy as np

import posenc

STAGES = ("forward", "training step")
_SMALL = 512, 1024


class Framework(ABC):
    """One array library.

    ``function(arrays)`` below maps a dict of arrays of this library to one array. A training step
    is the forward pass and the gradients of all floating arrays, for a given gradient of the
    result.
    """

    name = ""
    implementations = ("reference",)
    stages = STAGES

    def layout(self, tokens):
        """Queries, keys or values ``(B, H, L, D)`` with the axes in this framework's order."""
        return tokens

    def begin(self, threads):
        """Use so many threads in this process; returns itself."""
        return self

    @abstractmethod
    def xp(self):
        """Its namespace for posenc."""

    @abstractmethod
    def attention(self, *arguments, **options):
        """Attention of posenc."""

    @abstractmethod
    def without_positions(self, q, k, v):
        """The framework's own causal attention."""

    @abstractmethod
    def ready(self, function, arrays, stage):
        """A ``Ready`` of ``function``; arrays are NumPy's."""

    def ready_within(self, most, subject, length, stage):
        """``ready(*subject(length), stage)``; n/a if a call would take more bytes than ``most``.

        Foreseen from how memory grows between two short lengths.
        """
        if length > _SMALL[1]:
            less, more = (self.ready(*subject(n), stage).peak_memory() for n in _SMALL)
            exponent = max(1.0, math.log2(more / less))
            _refuse_above(most, more * (length / _SMALL[1]) ** exponent)
        return self.ready(*subject(length), stage)


class Ready(ABC):
    """A function that can be called again and again, and the memory of a call."""

    @abstractmethod
    def __call__(self):
        """Call it, and wait for the result."""

    @abstractmethod
    def peak_memory(self):
        """Most bytes that a call holds beside its arguments; calls it, or has compiled it."""


class NumPy(Framework):
    """NumPy, whose implementation is the reference."""

    name = "numpy"
    stages = ("forward",)

    def xp(self):
        return array_api_compat.numpy

    def attention(self, *arguments, **options):
        return posenc.attention(*arguments, **options)

    def without_positions(self, q, k, v):
        raise NotImplementedError("NumPy has no attention")

    def ready(self, function, arrays, stage):
        if stage not in self.stages:
            raise NotImplementedError("NumPy has no gradients")
        return _OnNumPy(function, arrays)


class _OnNumPy(Ready):
    def __init__(self, function, arrays):
        self._function, self._arrays = function, arrays

    def __call__(self):
        return self._function(self._arrays)

    def peak_memory(self):
        tracemalloc.start()
        self()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak


class Torch(Framework):
    """PyTorch, eager, on a CPU."""

    name = "torch"

    def __init__(self):
        self._backend = importlib.import_module("posenc_torch")
        self.implementations = self._backend.IMPLEMENTATIONS

    def xp(self):
        return importlib.import_module("array_api_compat.torch")

    def begin(self, threads):
        import torch

        torch.set_num_threads(threads)
        return self

    def attention(self, *arguments, **options):
        return self._backend.attention(*arguments, **options)

    def without_positions(self, q, k, v):
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ready(self, function, arrays, stage):
        return _OnTorch(function, arrays, stage)


class _OnTorch(Ready):
    def __init__(self, function, arrays, stage):
        import torch

        self._torch, self._function, self._learns = torch, function, stage == "training step"
        # On a CPU FlexAttention refuses tensors that require gradients, recorded or not.
        self._arrays = {
            name: torch.tensor(a, requires_grad=self._learns and _is_float(a))
            for name, a in arrays.items()
        }
        self._leaves = [a for a in self._arrays.values() if a.requires_grad]
        if self._learns:
            out = function(self._arrays)
            if not out.requires_grad:
                raise NotImplementedError("the result does not depend on floating arrays")
            self._d_out = torch.tensor(_like(out))

    def __call__(self):
        if not self._learns:
            with self._torch.no_grad():
                return self._function(self._arrays)
        out = self._function(self._arrays)
        return self._torch.autograd.grad(out, self._leaves, self._d_out, allow_unused=True)

    def peak_memory(self):
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self()
        events = profiler.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        return max(0, *np.cumsum([change for _, change in sorted(changes)]).tolist())


class Jax(Framework):
    """JAX, compiled, on its default device."""

    name = "jax"

    def __init__(self):
        self._backend = importlib.import_module("posenc_jax")
        self.implementations = self._backend.IMPLEMENTATIONS

    def xp(self):
        return importlib.import_module("jax.numpy")

    def layout(self, tokens):
        return np.ascontiguousarray(np.swapaxes(tokens, 1, 2))

    def begin(self, threads):
        os.environ["NPROC"] = str(threads)  # XLA reads it when the first array is made
        return self

    def attention(self, *arguments, **options):
        return self._backend.attention(*arguments, **options)

    def without_positions(self, q, k, v):
        import jax

        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def ready(self, function, arrays, stage):
        return _OnJax(function, arrays, stage)

    def ready_within(self, most, subject, length, stage):
        run = self.ready(*subject(length), stage)
        _refuse_above(most, run.peak_memory())  # known before the first call
        return run


class _OnJax(Ready):
    def __init__(self, function, arrays, stage):
        import jax

        self._jax, run = jax, function
        given = [jax.device_put(arrays)]
        if stage == "training step":
            out = jax.eval_shape(function, arrays)
            floats = {name for name, a in arrays.items() if _is_float(a)}
            if not floats:
                raise NotImplementedError("the result does not depend on floating arrays")
            given.append(jax.device_put(_like(out)))

            def run(arrays, d_out):
                fixed = {name: a for name, a in arrays.items() if name not in floats}
                leaves = {name: arrays[name] for name in floats}
                out, transpose = jax.vjp(lambda own: function(fixed | own), leaves)
                return out, transpose(d_out)[0]

        self._given = given
        self._compiled = jax.jit(run).lower(*given).compile()

    def __call__(self):
        return self._jax.block_until_ready(self._compiled(*self._given))

    def peak_memory(self):
        memory = self._compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes


def _refuse_above(most, needed):
    if needed > most:
        raise NotImplementedError(f"a call would take {needed / 2**30:.1f} GiB")


def _is_float(array):
    return np.issubdtype(array.dtype, np.floating)


def _like(out):
    return np.random.default_rng(2).standard_normal(tuple(out.shape), np.float32)


_ASKED = os.environ.get("POSENC_FRAMEWORKS", "").split()
FRAMEWORKS = {
    kind.name: kind()
    for kind in (NumPy, Torch, Jax)
    if kind.name in (_ASKED or [kind.name]) and importlib.util.find_spec(kind.name) is not None
}
IMPLEMENTATIONS = [
    f"{framework.name} {name}"
    for framework in FRAMEWORKS.values()
    for name in framework.implementations
]
FAST = [
    f"{framework.name} {name}"
    for framework in FRAMEWORKS.values()
    for name in framework.implementations
    if name != "reference" or len(framework.implementations) == 1
]
"""Without the references of frameworks that have more than these."""


def framework_of(implementation):
    """The framework of one of ``IMPLEMENTATIONS``, and the name that the framework knows."""
    framework, _, name = implementation.partition(" ")
    return FRAMEWORKS[framework], name
