"""Sines and cosines at far positions, against fifty digits of mpmath."""

from __future__ import annotations

from fractions import Fraction

import array_api_compat.numpy as numpy_namespace
import mpmath
import numpy as np
import pytest
from frameworks import FRAMEWORKS, HAS
from oracles import LIMITS
from sample import long, some

import posenc
from posenc.angles import Turns, frequencies
from posenc.testing.tolerances import UNIT

# What docs/exactness.md promises, with its reasons in ``oracles``: four roundings of 1. Fixed
# point keeps that up to 2**30; beyond, positions lose bits in float64 no sooner than at 2**53.
FLOAT32, FLOAT64 = (LIMITS["bounded"][d] * UNIT[d] for d in ("float32", "float64"))

FAR = [0, 1, -1, 3, 255, 256, 257, 2**20 + 1, -(2**20) - 1, 10**6, 2**24, -(2**24), 2**24 - 1]
MAX_POSITION = [-(2**30), 2**30 - 1, -(2**30) + 7, 2**29 + 12345]
SETTINGS = [(10_000.0, 8), (500_000.0, 16), (7.0, 6), (1.5, 4)]


GROUNDS = [(name, None) for name in FRAMEWORKS] + [("jax", "jit")] * HAS["jax"]
# JAX compiles one operation after the other, which is slow.
FAST = [(name, compiler) for name, compiler in GROUNDS if name != "jax" or compiler]


def exact(positions, base, dim):
    """Sines and cosines ``(L, dim / 2)`` as float64."""
    with mpmath.workdps(50):
        turns = [mpmath.power(base, -mpmath.mpf(2 * k) / dim) for k in range(dim // 2)]
        table = [[mpmath.mpf(pos) * f for f in turns] for pos in positions]
        sin = [[float(mpmath.sin(a)) for a in row] for row in table]
        return np.asarray(sin), np.asarray([[float(mpmath.cos(a)) for a in row] for row in table])


def pair(base, dim):
    return posenc.RoPE(dim, base=base), posenc.Sinusoidal(dim, base=base, layout="concatenated")


def both_layouts(schemes, pos, dtype, xp):
    """Sine and cosine as RoPE turns a unit vector, and as a sinusoid holds them."""
    (rope, sinusoidal), half = schemes, schemes[0].head_dim // 2
    unit = xp.stack([xp.ones_like(pos)] * half + [xp.zeros_like(pos)] * half, axis=-1)
    x = xp.astype(unit, dtype)
    turned = rope.transform(x, pos, role="query", params={}, xp=xp)
    held = posenc.embedding(sinusoidal, pos, dtype=dtype, xp=xp)
    cos, sin = turned[..., :half], turned[..., half:]
    return xp.stack([sin, cos, held[..., :half], held[..., half:]], axis=0)


def check(found, positions, base, dim, tolerance):
    sin, cos = exact(positions, base, dim)
    error = np.max(np.abs(np.asarray(found, np.float64) - [sin, cos, sin, cos]))
    assert error <= tolerance


@pytest.mark.parametrize(("base", "dim"), SETTINGS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "compiler"), some(GROUNDS, FAST, long))
def test_angles_at_far_positions(name, compiler, dtype, base, dim):
    framework, positions = FRAMEWORKS[name], FAR + MAX_POSITION
    if dtype not in framework.dtypes:
        pytest.skip(f"{name} has no {dtype}")
    wide = dtype == "float64"
    schemes = pair(base, dim)
    # JAX keeps 64-bit integers only beside 64-bit floats: ``unused`` asks for them.
    arrays = {
        "pos": np.asarray(positions, np.int64 if wide else np.int32),
        "unused": np.zeros(1, dtype),
    }

    def angles(xp, arrays):
        return both_layouts(schemes, arrays["pos"], getattr(xp, dtype), xp)

    found = framework.evaluate(angles, arrays, compiler=compiler)
    assert found.dtype == dtype
    check(found.values, positions, base, dim, FLOAT64 if wide else FLOAT32)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_holds_to_the_ends_of_the_range(sign):
    pos, turns = sign * (2**30 - 1 - np.arange(4096)), posenc.RoPE(128)._turns
    exact, found = (
        turns.sincos(pos, dtype=d, xp=numpy_namespace) for d in (np.float64, np.float32)
    )
    assert np.abs(np.asarray(exact) - found).max() <= 1.5e-7


@pytest.mark.skipif(not HAS["jax"], reason="jax is not installed")
@pytest.mark.parametrize(("base", "dim"), SETTINGS[:2])
def test_concrete_positions_under_jit(base, dim):
    import jax
    import jax.numpy as jnp

    positions = FAR + MAX_POSITION
    schemes, pos = pair(base, dim), jnp.asarray(positions)
    found = jax.jit(lambda: both_layouts(schemes, pos, jnp.float32, jnp))()
    check(found, positions, base, dim, FLOAT32)


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
@pytest.mark.parametrize("backend", some(["aot_eager", "inductor"], ["aot_eager"], long))
def test_compiled_by_torch(backend):
    import array_api_compat.torch as xp
    import torch

    base, dim = SETTINGS[0]
    schemes = pair(base, dim)

    def angles(pos):
        return [both_layouts(schemes, pos, dtype, xp) for dtype in (torch.float32, torch.float64)]

    positions = FAR + MAX_POSITION
    compiled = torch.compile(angles, fullgraph=True, backend=backend)
    narrow, wide = compiled(torch.tensor(positions))
    check(narrow, positions, base, dim, FLOAT32)
    check(wide, positions, base, dim, FLOAT64)


def test_frequencies_are_exact():
    with mpmath.workdps(50):
        found = frequencies(10_000.0, [Fraction(0), Fraction(1, 3), Fraction(1)])
        expected = [mpmath.power(10_000, -mpmath.mpf(n) / 3) for n in (0, 1, 3)]
        assert all(
            abs(mpmath.mpf(str(f)) - e) < mpmath.mpf(10) ** -45
            for f, e in zip(found, expected, strict=True)
        )


def test_fast_frequencies_wrap_many_times():
    radians = [6.0, 3.2, 100.0, 0.0]
    sin, cos = Turns(radians).sincos(np.asarray([1, 12345]), dtype=np.float64, xp=_numpy())
    with mpmath.workdps(50):
        for row, pos in enumerate((1, 12345)):
            for column, f in enumerate(radians):
                angle = mpmath.mpf(f) * pos
                assert abs(sin[row, column] - float(mpmath.sin(angle))) <= FLOAT64
                assert abs(cos[row, column] - float(mpmath.cos(angle))) <= FLOAT64


def _numpy():
    import array_api_compat.numpy

    return array_api_compat.numpy
