"""What ``gate.py`` guards: a few calls of a fraction of a second, each in a function that makes it.

A function prepares and returns one call without arguments. It may use only what posenc has had for
long, because it also runs with the older of two commits. Where that lacks something, the gate says
so and compares the others.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Run = Callable[[], Any]


class Compiled:
    """A call of a program of JAX, which counts its own instructions."""

    def __init__(self, program: Any, arrays: Any) -> None:
        self._program, self._arrays = program, arrays

    def __call__(self) -> None:
        import jax

        jax.block_until_ready(self._program(*self._arrays))

    def counts(self) -> dict[str, int]:
        """Instructions of the compiled program."""
        return {"XLA instructions": self._program.as_text().count(" = ")}


HEADS, DIM, LENGTH = 4, 64, 1024


def start() -> Run:
    """``import posenc`` in a process of its own."""
    return lambda: subprocess.run([sys.executable, "-c", "import posenc"], check=True)


def bias() -> Run:
    """The dense bias of T5 in NumPy, 512 x 512."""
    import posenc

    t5, pos = posenc.T5Bias(num_heads=HEADS), np.arange(512)
    params = posenc.init_params(t5)
    return lambda: posenc.bias(t5, pos, pos, params)


def transform() -> Run:
    """RoPE of queries in NumPy."""
    import posenc

    rope, pos = posenc.RoPE(DIM), np.arange(LENGTH)
    x = _values(HEADS, LENGTH)[0]
    return lambda: posenc.transform(rope, x, pos, role="query")


def torch_small() -> Run:
    """ALiBi with 64 tokens in PyTorch: mostly the cost of a call."""
    import posenc

    return _torch_forward(posenc.ALiBi(HEADS), 64, 64)


def torch_decode() -> Run:
    """One query against 1024 keys in PyTorch, with ALiBi."""
    import posenc

    return _torch_forward(posenc.ALiBi(HEADS), 1, LENGTH)


def torch_forward() -> Run:
    """``chunked`` with ALiBi in PyTorch."""
    import posenc

    return _torch_forward(posenc.ALiBi(HEADS), LENGTH, LENGTH, implementation="chunked")


def torch_step() -> Run:
    """A training step of ``chunked`` with a learned T5 table in PyTorch."""
    import torch

    import posenc
    import posenc_torch

    torch.set_num_threads(1)
    t5 = posenc.T5Bias(num_heads=HEADS, causal=True)
    leaves = [torch.tensor(a, requires_grad=True) for a in _values(HEADS, LENGTH)]
    table = torch.tensor(posenc.init_params(t5)["table"], requires_grad=True)

    def step() -> None:
        out = posenc_torch.attention(
            *leaves, t5, {"table": table}, causal=True, implementation="chunked"
        )
        torch.autograd.grad(out.sum(), [*leaves, table])

    return step


def torch_transform() -> Run:
    """RoPE of queries in PyTorch."""
    import array_api_compat.torch as xp
    import torch

    import posenc

    torch.set_num_threads(1)
    rope, pos, x = posenc.RoPE(DIM), torch.arange(LENGTH), torch.tensor(_values(HEADS, LENGTH)[0])
    return lambda: posenc.transform(rope, x, pos, role="query", xp=xp)


def jax_forward() -> Run:
    """``chunked`` with ALiBi in JAX, compiled."""
    import posenc

    return _jax_forward(posenc.ALiBi(HEADS))


def jax_rope() -> Run:
    """``chunked`` with RoPE in JAX, compiled."""
    import posenc

    return _jax_forward(posenc.RoPE(DIM))


def _torch_forward(scheme: Any, queries: int, keys: int, **options: Any) -> Run:
    import torch

    import posenc_torch

    torch.set_num_threads(1)
    q, k, v = (torch.tensor(a) for a in _values(HEADS, keys))
    q = q[:, :, keys - queries :]

    @torch.no_grad()
    def forward() -> None:
        posenc_torch.attention(q, k, v, scheme, causal=True, **options)

    return forward


def _jax_forward(scheme: Any) -> Run:
    import jax

    import posenc_jax

    arrays = jax.device_put([a.swapaxes(1, 2) for a in _values(HEADS, LENGTH)])

    def attend(q: Any, k: Any, v: Any) -> Any:
        return posenc_jax.attention(q, k, v, scheme, causal=True, implementation="chunked")

    return Compiled(jax.jit(attend).lower(*arrays).compile(), arrays)


def _values(heads: int, length: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((3, 1, heads, length, DIM), np.float32)


GUARDED: dict[str, Callable[[], Run]] = {
    function.__name__: function
    for function in (
        start, bias, transform, torch_small, torch_decode, torch_forward, torch_step,
        torch_transform, jax_forward, jax_rope,
    )
}  # fmt: skip
