"""Attention in PyTorch and JAX: every scheme, every implementation, forward and backward."""

from __future__ import annotations

import importlib

import numpy as np

from suite import DIM, HEADS, NAMES, Timed, hidden_states, lengths, make, warm

_LENGTHS = lengths(512, 2048)


def implementations(package):
    """Names of a backend's implementations; ``["missing"]`` if its framework is missing."""
    try:
        return list(importlib.import_module(package).IMPLEMENTATIONS)
    except ImportError:
        return ["missing"]


def _arrays(name, length, shape):
    scheme, params = make(name, length)
    values = np.random.default_rng(0).standard_normal((3, *shape), np.float32)
    return scheme, values, params, hidden_states(scheme, params, length)


class Torch(Timed):
    """Causal attention, ``B=1 H=8 D=64``, float32."""

    param_names = ("scheme", "implementation", "length")
    params = (NAMES, implementations("posenc_torch"), _LENGTHS)

    @warm
    def setup(self, name, implementation, length):
        if implementation == "missing":
            raise NotImplementedError("torch is not installed")
        import torch

        import posenc_torch

        torch.set_num_threads(1)
        scheme, values, params, x = _arrays(name, length, (1, HEADS, length, DIM))
        hidden = {key: torch.tensor(value) for key, value in x.items()}
        leaves = [torch.tensor(a, requires_grad=True) for a in (*values, *params.values())]
        own = dict(zip(params, leaves[3:], strict=True))

        def attend():
            return posenc_torch.attention(
                *leaves[:3], scheme, own, True, implementation=implementation, **hidden
            )

        def step():
            torch.autograd.grad(attend().sum(), leaves, allow_unused=True)

        def forward():
            with torch.no_grad():
                attend()

        self.forward, self.step = forward, step

    def time_forward(self, *_):
        self.forward()

    def time_forward_and_backward(self, *_):
        self.step()


class Jax(Timed):
    """Causal attention, ``B=1 H=8 D=64``, float32, compiled."""

    param_names = ("scheme", "implementation", "length")
    params = (NAMES, implementations("posenc_jax"), _LENGTHS)

    @warm
    def setup(self, name, implementation, length):
        if implementation == "missing":
            raise NotImplementedError("jax is not installed")
        import jax

        import posenc_jax

        scheme, values, params, hidden = _arrays(name, length, (1, length, HEADS, DIM))
        arguments = jax.device_put((*values, params))

        def total(q, k, v, params):
            return posenc_jax.attention(
                q, k, v, scheme, params, True, implementation=implementation, **hidden
            ).sum()

        compiled = [
            jax.jit(f).lower(*arguments).compile()
            for f in (total, jax.grad(total, argnums=(0, 1, 2, 3)))
        ]
        self.memory = compiled[1].memory_analysis().temp_size_in_bytes
        self.forward, self.step = (
            lambda f=f: jax.block_until_ready(f(*arguments)) for f in compiled
        )

    def time_forward(self, *_):
        self.forward()

    def time_forward_and_backward(self, *_):
        self.step()

    def track_memory_of_backward(self, *_):
        return self.memory

    track_memory_of_backward.unit = "bytes"
