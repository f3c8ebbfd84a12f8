"""JAX as the laws of ``posenc.testing`` use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from posenc.testing.framework import Framework, Function, Host
from posenc_jax.api import IMPLEMENTATIONS, attention
from posenc_jax.chunked import blocks

_BLOCK = 8  # so that short sequences have several tiles, the last of them padded


class Jax(Framework):
    """JAX on its default device, eager and compiled, in tiles of a few tokens."""

    name = "jax"
    xp = jnp
    implementations = IMPLEMENTATIONS
    dtypes = ("float64", "float32", "float16", "bfloat16")
    compilers = ("jit",)
    usual = "quick"  # jit, with fewer optimisations: most laws wait for the compiler alone
    differentiable = True

    def array(self, array: Host, dtype: str) -> Array:
        return jnp.asarray(array, dtype=dtype if "float" in dtype else None)

    def host(self, array: Array) -> Host:
        return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)

    def scope(self, dtypes: Sequence[str]) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(jax.enable_x64("float64" in dtypes))
        stack.enter_context(_small_blocks())
        return stack

    def compiled(self, function: Function, compiler: str) -> Function:
        return partial(_call, _compiled(function, compiler))

    def attend(self, implementation: str, tensors: Mapping[str, Array], **options: Any) -> Any:
        own = {name: _swapped(a) if a.ndim == 4 else a for name, a in tensors.items()}
        found = attention(**own, implementation=implementation, **options)
        return tuple(map(_swapped, found)) if isinstance(found, tuple) else _swapped(found)

    def pullback(
        self,
        function: Function,
        arrays: dict[str, Array],
        names: Sequence[str],
        d_out: Host,
        compiler: str | None,
    ) -> tuple[Array, dict[str, Array]]:
        both = _pullback(function, tuple(names), compiler or self.usual)
        return both(arrays, jnp.asarray(d_out))


@contextmanager
def _small_blocks() -> Any:
    usual, blocks.BLOCK = blocks.BLOCK, _BLOCK
    try:
        yield
    finally:
        blocks.BLOCK = usual


def _swapped(array: Array) -> Array:
    return jnp.swapaxes(array, 1, 2)


def _call(compiled: Callable[[dict[str, Array]], Any], xp: Any, arrays: dict[str, Array]) -> Any:
    return compiled(arrays)


def _options(compiler: str) -> dict[str, Any]:
    quick = {"xla_backend_optimization_level": 1}
    return {"compiler_options": quick} if compiler == Jax.usual else {}


@lru_cache(64)
def _compiled(function: Function, compiler: str) -> Callable[[dict[str, Array]], Any]:
    return jax.jit(partial(function, jnp), **_options(compiler))


@lru_cache(64)
def _pullback(function: Function, names: tuple[str, ...], compiler: str) -> Callable[..., Any]:
    def both(arrays: dict[str, Array], d_out: Array) -> Any:
        leaves = {name: arrays[name] for name in names}
        out, pull = jax.vjp(lambda leaves: function(jnp, {**arrays, **leaves}), leaves)
        assert out is not None
        return out, pull(d_out.astype(out.dtype))[0]

    return jax.jit(both, **_options(compiler))
