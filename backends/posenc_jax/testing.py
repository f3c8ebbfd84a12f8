"""JAX for the laws of ``posenc.testing``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from posenc.backend import Arguments, LayerPlan
from posenc.testing import Framework, Function, Host
from posenc_jax.api import IMPLEMENTATIONS, attention
from posenc_jax.bound import Bound
from posenc_jax.chunked.blocks import block_size
from posenc_jax.position import Positions

_BLOCK_SIZE = 8  # so that short sequences have several tiles, with padding in the last


class Jax(Framework):
    """JAX on its default device, eager and compiled, in tiles of a few tokens."""

    name = "jax"
    xp = jnp
    implementations = IMPLEMENTATIONS
    dtypes = ("float64", "float32", "float16", "bfloat16")
    compilers = ("jit",)
    default_compiler = "quick"  # jit with fewer optimisations: compiling takes most of the time
    differentiable = True

    def array(self, array: Host, dtype: str) -> Array:
        return jnp.asarray(array, dtype=dtype if "float" in dtype else None)

    def host(self, array: Array) -> Host:
        return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)

    def precision_scope(self, dtypes: Sequence[str]) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(_enable_x64()("float64" in dtypes))
        stack.enter_context(block_size(_BLOCK_SIZE))
        return stack

    def compile(self, function: Function, compiler: str) -> Function:
        return partial(_call, _compile(function, compiler))

    def attend(self, implementation: str, tensors: Mapping[str, Array], **options: Any) -> Any:
        own: dict[str, Any] = {n: _swap(a) if a.ndim == 4 else a for n, a in tensors.items()}
        out = attention(**own, implementation=implementation, **options)
        return tuple(map(_swap, out)) if isinstance(out, tuple) else _swap(out)

    def attend_in_pass(
        self, implementation: str, tensors: Mapping[str, Array], layers: int, **options: Any
    ) -> Any:
        given = dict(options)
        plan, params = LayerPlan.of(given.pop("scheme"), layers), given.pop("params")
        own = {str(layer): params for layer in plan.first_layers}
        named = ("k_transformed", "scale", "softcap")
        of_call: dict[str, Any] = {name: given.pop(name) for name in named if name in given}
        of_call |= {n: a for n, a in tensors.items() if n == "bias"}
        causal = given.pop("causal", False)
        bound = Bound(Positions(plan, own), Arguments(**given), causal, implementation)
        q, k, v = (_swap(tensors[name]) for name in "qkv")
        outs = [attend(q, k, v, **of_call) for attend in bound]
        return _swap(outs[-1])

    def pullback(
        self,
        function: Function,
        arrays: dict[str, Array],
        names: Sequence[str],
        d_out: Host,
        compiler: str | None,
    ) -> tuple[Array, dict[str, Array]]:
        both = _pullback(function, tuple(names), compiler or self.default_compiler)
        out, gradients = both(arrays, jnp.asarray(d_out))
        return out, gradients


def _enable_x64() -> Any:
    """``jax.enable_x64``, which had another place before JAX 0.8."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64
    return importlib.import_module("jax.experimental").enable_x64


def _swap(array: Array) -> Array:
    return jnp.swapaxes(array, 1, 2)


def _call(compiled: Callable[[dict[str, Array]], Any], xp: Any, arrays: dict[str, Array]) -> Any:
    return compiled(arrays)


_COMPILER_OPTIONS = {
    "quick": {"xla_backend_optimization_level": 1},
    "untuned": {"xla_gpu_autotune_level": 0},  # a GPU times no matrix products
}


def _options(compiler: str) -> dict[str, Any]:
    return {"compiler_options": _COMPILER_OPTIONS.get(compiler)}


@lru_cache(64)
def _compile(function: Function, compiler: str) -> Callable[[dict[str, Array]], Any]:
    return jax.jit(partial(function, jnp), **_options(compiler))


@lru_cache(64)
def _pullback(function: Function, names: tuple[str, ...], compiler: str) -> Callable[..., Any]:
    def run(arrays: dict[str, Array], d_out: Array) -> Any:
        leaves = {name: arrays[name] for name in names}
        out, transpose = jax.vjp(lambda leaves: function(jnp, {**arrays, **leaves}), leaves)
        assert out is not None
        return out, transpose(d_out.astype(out.dtype))[0]

    return jax.jit(run, **_options(compiler))
