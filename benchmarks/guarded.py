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
from harness.run import FORWARD, STEP, Arrays, Ready, load, named

Run = Callable[[], Any]
Make = Callable[[Any], Any]  # a scheme, from the package posenc
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
    return _transform("numpy")


def torch_small() -> Run:
    """ALiBi with 64 tokens in PyTorch: mostly the cost of a call."""
    return _attention("torch", _alibi, FORWARD, 64)


def torch_decode() -> Run:
    """One query against 1024 keys in PyTorch, with ALiBi."""
    return _attention("torch", _alibi, FORWARD, LENGTH, queries=1)


def torch_forward() -> Run:
    """``chunked`` with ALiBi in PyTorch."""
    return _attention("torch", _alibi, FORWARD, LENGTH, implementation="chunked")


def torch_step() -> Run:
    """A training step of ``chunked`` with a learned T5 table in PyTorch."""
    return _attention("torch", _t5, STEP, LENGTH, implementation="chunked")


def torch_transform() -> Run:
    """RoPE of queries in PyTorch."""
    return _transform("torch")


def jax_forward() -> Run:
    """``chunked`` with ALiBi in JAX, compiled."""
    return _attention("jax", _alibi, FORWARD, LENGTH, implementation="chunked")


def jax_rope() -> Run:
    """``chunked`` with RoPE in JAX, compiled."""
    return _attention("jax", _rope, FORWARD, LENGTH, implementation="chunked")


def _alibi(posenc: Any) -> Any:
    return posenc.ALiBi(HEADS)


def _t5(posenc: Any) -> Any:
    return posenc.T5Bias(num_heads=HEADS, causal=True)


def _rope(posenc: Any) -> Any:
    return posenc.RoPE(DIM)


def _transform(framework: str) -> Ready:
    import posenc

    runner = load(framework).begin(threads=1)
    rope, xp = _rope(posenc), runner.xp()

    def function(arrays: Arrays) -> Any:
        return posenc.transform(rope, arrays["q"], arrays["pos"], role="query", xp=xp)

    q, _, _ = _values(LENGTH)
    return runner.ready(function, {"q": q, "pos": np.arange(LENGTH)}, FORWARD)


def _attention(
    framework: str, make: Make, kind: str, keys: int, queries: int | None = None, **options: Any
) -> Ready:
    """Causal attention of the last queries."""
    import posenc

    runner = load(framework).begin(threads=1)
    own = make(posenc)
    q, k, v = _values(keys)
    vectors = {"q": q[:, :, keys - (queries or keys) :], "k": k, "v": v}

    arrays = {name: runner.layout(a) for name, a in vectors.items()}
    return runner.ready(
        runner.attend(own, **options), arrays | named(posenc.init_params(own)), kind
    )


def _values(length: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((3, 1, HEADS, length, DIM), np.float32)


GUARDED: dict[str, Callable[[], Run]] = {
    function.__name__: function
    for function in (
        start, bias, transform, torch_small, torch_decode, torch_forward, torch_step,
        torch_transform, jax_forward, jax_rope,
    )
}  # fmt: skip
