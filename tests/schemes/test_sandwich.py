"""Sandwich: the product of two sinusoidal embeddings, in mpmath."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

import posenc
from posenc.schemes import Sandwich
from posenc.testing.tolerances import rounding_bound


def exact(distance, *, heads, dim, base=10_000):
    """The paper's listing: embeddings of both positions, multiplied, over ``8 h / H``."""
    with mpmath.workdps(40):
        frequencies = [mpmath.power(base, -mpmath.mpf(2 * k) / dim) for k in range(dim // 2)]
        i, j = 1000 + distance, 1000
        product = sum(
            mpmath.sin(i * f) * mpmath.sin(j * f) + mpmath.cos(i * f) * mpmath.cos(j * f)
            for f in frequencies
        )
        return [float(product * heads / (8 * h)) for h in range(1, heads + 1)]


DISTANCES = [0, 1, 2, 17, 400, 10**6, 2**30 - 1000]


@pytest.mark.parametrize(
    ("heads", "dim", "options"), [(8, 128, {}), (12, 6, {"base": 500.0}), (1, 2, {})]
)
def test_the_bias_is_that_of_the_listing_near_and_far(heads, dim, options):
    scheme = Sandwich(heads, dim=dim, **options)
    q, k = np.asarray([0]), -np.asarray(DISTANCES)
    want = np.asarray([exact(n, heads=heads, dim=dim, **options) for n in DISTANCES]).T
    largest = heads * dim / 16
    for dtype in ("float32", "float64"):
        found = posenc.bias(scheme, q, k, dtype=np.dtype(dtype))[:, 0]
        # Each cosine has six roundings of at most pi, and the sum one each.
        bound = rounding_bound(20 + dim // 2, largest, dtype)
        np.testing.assert_allclose(found, want, rtol=0, atol=bound)


def test_by_numbers():
    # One frequency, 1: cos(n) times H / (8 h).
    found = posenc.bias(Sandwich(2, dim=2), np.asarray([0, 3]), np.asarray([0]), dtype=np.float64)
    cos3 = -0.98999249660044545727
    np.testing.assert_allclose(
        found[..., 0], [[0.25, 0.25 * cos3], [0.125, 0.125 * cos3]], rtol=1e-15
    )


def test_the_same_on_both_sides():
    q, k = np.asarray([50]), np.arange(101)
    found = posenc.bias(Sandwich(2), q, k)[:, 0]
    np.testing.assert_array_equal(found, found[:, ::-1])
    assert np.all(np.argmax(found, axis=1) == 50)


def test_the_catalogue_has_the_papers_width_whatever_the_models():
    assert posenc.make("sandwich", num_heads=2, head_dim=8) == Sandwich(2, dim=128)
    assert posenc.make("sandwich", num_heads=2, dim=64, base=100.0) == Sandwich(2, base=100.0)


def test_wrong_options():
    with pytest.raises(ValueError, match="dim must be even, got 7"):
        Sandwich(2, dim=7)
    with pytest.raises(ValueError, match="base must be finite and greater than 0, got -1"):
        Sandwich(2, base=-1)
