"""Array libraries behind one face each, and every way to attention behind another.

Tests hold NumPy arrays: a ``Library`` or a ``Route`` takes them in, and hands NumPy arrays back.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import array_api_compat.numpy
import array_api_strict
import numpy as np
import pytest
from subjects import readonly

import posenc

HAS = {name: importlib.util.find_spec(name) is not None for name in ("torch", "jax")}
if HAS["torch"]:
    import array_api_compat.torch as torch_namespace
    import torch

    import posenc_torch

    torch.set_num_threads(1)
if HAS["jax"]:
    import jax
    import jax.numpy as jnp

    import posenc_jax


@dataclass(frozen=True)
class Library:
    """One array library, on one device, eager or traced."""

    name: str
    xp: Any
    array: Callable[[Any], Any]
    numpy: Callable[[Any], np.ndarray] = np.asarray
    trace: Callable[[Callable], Callable] = lambda function: function
    device: Any = None
    wide: bool = True  # whether it has float64
    slow: bool = False  # whether each new function takes it a second
    scope: Callable[[bool], Any] = lambda wide: contextlib.nullcontext()

    def __call__(self, function: Callable, arrays: Mapping[str, Any], *, wide: bool = False):
        """``function(**arrays)``: the result as this library gives it, then as NumPy."""
        names = list(arrays)
        with self.scope(wide):
            native = [self.array(arrays[name]) for name in names]
            traced = self.trace(lambda *values: function(dict(zip(names, values, strict=True))))
            result = traced(*native)
            return result, None if result is None else self.numpy(result)


def _strict(name: str) -> Library:
    device = array_api_strict.Device(name)
    cpu = array_api_strict.Device("CPU_DEVICE")
    return Library(
        f"strict-{name}",
        array_api_strict,
        array=lambda a: array_api_strict.asarray(a, device=device),
        numpy=lambda a: np.asarray(a.to_device(cpu)),
        device=device,
        wide=name != "no_float64",
    )


def _libraries() -> list[Any]:
    found = [
        Library("numpy", array_api_compat.numpy, array=readonly),
        _strict("device1"),
        _strict("no_float64"),
    ]
    if HAS["torch"]:
        found.append(
            Library(
                "torch",
                torch_namespace,
                array=lambda a: torch.from_numpy(np.array(a)),
                numpy=lambda a: a.detach().numpy(),
                device=torch.device("cpu"),
            )
        )
    if HAS["jax"]:
        for name, trace in {"jax": lambda f: f, "jax-jit": jax.jit}.items():
            found.append(
                Library(name, jnp, jnp.asarray, trace=trace, scope=jax.enable_x64, slow=True)
            )
    return [pytest.param(lib, id=lib.name) for lib in found] + _missing()


def _missing() -> list[Any]:
    return [
        pytest.param(None, id=name, marks=pytest.mark.skip(reason=f"{name} is not installed"))
        for name, here in HAS.items()
        if not here
    ]


LIBRARIES = _libraries()


@dataclass(frozen=True)
class Route:
    """One path of one backend. Tensors are NumPy, ``(B, H, L, D)`` whatever its own layout."""

    backend: str
    path: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.path}"

    def attend(self, scheme, tensors, params, *, dtype="float32", **options) -> np.ndarray:
        """Attention of tensors cast to ``dtype``, as float64."""
        run = {"numpy": _numpy, "torch": _torch, "jax": _jax}[self.backend]
        return run(self.path, scheme, tensors, params, dtype, options, None)[0]

    def gradients(self, scheme, tensors, params, d_out, *, dtype="float32", **options):
        """The result, and gradients of ``sum(result * d_out)`` by name."""
        run = {"torch": _torch, "jax": _jax}[self.backend]
        return run(self.path, scheme, tensors, params, dtype, options, d_out)


def _routes() -> list[Route]:
    found = [Route("numpy", "reference")]
    if HAS["torch"]:
        found += [Route("torch", path) for path in posenc_torch.PATHS]
    if HAS["jax"]:
        found += [Route("jax", path) for path in posenc_jax.PATHS]
    return found


ROUTES = [pytest.param(route, id=str(route)) for route in _routes()] + _missing()
FUSED = [p for p in ROUTES if p.values[0] is None or p.values[0].backend != "numpy"]


def _numpy(path, scheme, tensors, params, dtype, options, d_out):
    cast = {name: np.asarray(a, dtype=dtype) for name, a in tensors.items()}
    params = {name: np.asarray(a, dtype=_at_least_float32(dtype)) for name, a in params.items()}
    out = posenc.attention(**cast, scheme=scheme, params=params, path=path, **options)
    return out.astype(np.float64), {}


def _at_least_float32(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _torch(path, scheme, tensors, params, dtype, options, d_out):
    def leaf(array, dtype):
        return torch.tensor(array, dtype=getattr(torch, dtype), requires_grad=True)

    tensors = {name: leaf(a, dtype) for name, a in tensors.items()}
    params = {name: leaf(a, _at_least_float32(dtype)) for name, a in params.items()}
    options = {
        name: torch.tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    out = posenc_torch.attention(**tensors, scheme=scheme, params=params, path=path, **options)
    assert out.dtype == getattr(torch, dtype)
    result = out.detach().double().numpy()
    if d_out is None:
        return result, {}
    out.backward(torch.tensor(d_out, dtype=out.dtype))
    leaves = tensors | params
    return result, {
        name: (torch.zeros_like(a) if a.grad is None else a.grad).double().numpy()
        for name, a in leaves.items()
    }


def _jax(path, scheme, tensors, params, dtype, options, d_out):
    fixed = {name: o for name, o in options.items() if not isinstance(o, np.ndarray)}
    traced = {name: o for name, o in options.items() if isinstance(o, np.ndarray)}
    layout = {name: np.swapaxes(a, 1, 2) if a.ndim == 4 else a for name, a in tensors.items()}

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})  # compiles sooner
    def both(tensors, params, traced, d_out):
        def attend(tensors, params):
            return posenc_jax.attention(
                **tensors, scheme=scheme, params=params, path=path, **fixed, **traced
            )

        if d_out is None:
            return attend(tensors, params), ({}, {})
        out, pull = jax.vjp(attend, tensors, params)
        return out, pull(jnp.swapaxes(d_out, 1, 2).astype(out.dtype))

    with jax.enable_x64(dtype == "float64"):
        cast = {name: jnp.asarray(a, dtype=dtype) for name, a in layout.items()}
        wide = {n: jnp.asarray(a, dtype=_at_least_float32(dtype)) for n, a in params.items()}
        out, (d_tensors, d_params) = both(cast, wide, traced, d_out)
        assert out.dtype == dtype
        back = {
            name: np.swapaxes(a, 1, 2) if a.ndim == 4 and name in tensors else a
            for name, a in (d_tensors | d_params).items()
        }
        wide = {name: np.asarray(a.astype(_at_least_float32(dtype))) for name, a in back.items()}
        result = np.swapaxes(np.asarray(out.astype(_at_least_float32(dtype))), 1, 2)
    return result.astype(np.float64), {n: a.astype(np.float64) for n, a in wide.items()}


def assert_near(found, expected, tolerance: float, what: str = "values") -> None:
    """Largest difference at most ``tolerance`` times the largest expected number, or 1."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, not {expected.shape}"
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected), err_msg=what)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite], err_msg=what)
    found, expected = found[finite], expected[finite]
    assert np.all(np.isfinite(found)), f"{what}: not finite"
    scale = max(1.0, np.max(np.abs(expected), initial=0))
    error = np.max(np.abs(found - expected), initial=0) / scale
    assert error <= tolerance, f"{what}: off by {error:.2e}, tolerance {tolerance:.0e}"
