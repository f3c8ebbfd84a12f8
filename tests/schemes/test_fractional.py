"""Fractional positions against RoPE's formula in float64, at positions that are no integers."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import ROUTES
from sample import long
from subjects import normal

import posenc
from posenc.positions import fractional
from posenc.schemes import PI, Fractional
from posenc.testing.tolerances import ATTENTION_TOL, UNIT, assert_near

HEADS, DIM, LENGTH = 2, 8, 12
TEXT = np.array([1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1], bool)
POSITIONS = {
    1 / 4: np.array([0, 4, 8, 9, 10, 11, 12, 16, 20, 21, 22, 26]) / 4,
}
POSITIONS[1 / 256] = np.array([0, 256, 512, 513, 514, 515, 516, 772, 1028, 1029, 1030, 1286]) / 256
QUICK = [r for r in ROUTES if r.id.startswith(("numpy", "torch")) and r.id != "torch-flex"]
LATER = [r for r in ROUTES if r.id == "jax-chunked"]  # two seconds to compile
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))


def by_formula(at):
    """Causal attention of RoPE at real positions, in float64."""
    theta = 10_000.0 ** (-np.arange(DIM // 2) * 2 / DIM)
    turns = np.exp(1j * at[:, None] * theta)
    q, k = ((a[..., : DIM // 2] + 1j * a[..., DIM // 2 :]) * turns for a in (Q, K))
    scores = np.einsum("bhid,bhjd->bhij", q, np.conj(k)).real / np.sqrt(DIM)
    weights = np.where(np.arange(LENGTH)[:, None] >= np.arange(LENGTH), np.exp(scores), 0)
    return weights / weights.sum(axis=-1, keepdims=True) @ V


@pytest.mark.parametrize("route", QUICK + [pytest.param(*r.values, marks=long) for r in LATER])
@pytest.mark.parametrize("step", POSITIONS)
def test_images_advance_by_fractions(route, step):
    places = fractional(np.where(TEXT, 1, step))
    np.testing.assert_array_equal(places / 256, POSITIONS[step])
    scheme, where = posenc.RoPE(DIM, scaling=Fractional()), {"tokens": posenc.Tokens(places=places)}
    tensors = {name: a.astype(np.float32) for name, a in zip("qkv", (Q, K, V), strict=True)}
    out = route.attend(scheme, tensors, {}, causal=True, **where)
    assert_near(out, by_formula(POSITIONS[step]), ATTENTION_TOL["float32"], str(route))


def test_far_positions_are_exact():
    """At 3 million tokens, whose units float32 does not represent."""
    scheme, unit = posenc.RoPE(2, scaling=Fractional(256)), np.array([[1.0, 0.0]])
    at = 3_000_000 * 256 + 77
    angle = np.longdouble(at) / 256 % (2 * np.longdouble(np.pi))
    turned = posenc.transform(scheme, unit.astype(np.float32), np.array([at]), role="key")
    # The period is known to 64 bits: 3e6 / 2 pi turns of it are off by 4e-13 at most.
    expected = [[np.cos(angle), np.sin(angle)]]
    np.testing.assert_allclose(turned, expected, rtol=0, atol=4 * UNIT["float32"])


def test_text_alone_is_rope():
    places = fractional(np.ones((2, LENGTH)), 16)
    scheme = posenc.RoPE(DIM, scaling=Fractional(16))
    found = posenc.transform(scheme, Q, places, role="query")
    np.testing.assert_allclose(
        found, posenc.transform(posenc.RoPE(DIM), Q, np.arange(LENGTH), role="query"), atol=1e-14
    )
    assert scheme != posenc.RoPE(DIM, scaling=PI(16.0))


@pytest.mark.parametrize("denominator", [3, 10, 49, 100, 256, 1000])
def test_multiples_that_are_no_floats(denominator):
    advances = [n / denominator for n in range(3 * denominator)]
    expected = np.cumsum(range(3 * denominator))
    np.testing.assert_array_equal(fractional(advances, denominator), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fractional([1, 0.29 + 1e-12], 100), "multiple of 1/100"),
        (lambda: fractional([1, 1, 0.3]), r"advances\[\(2,\)\] = 0\.3.* multiple of 1/256"),
        (lambda: fractional([[1, 1], [1, np.nan]]), r"advances\[\(1, 1\)\] = nan"),
        (lambda: fractional([1, np.inf]), r"advances\[\(1,\)\] = inf"),
        (lambda: posenc.RoPE(DIM, scaling=Fractional()).to_hf(), "Fractional"),
        (lambda: fractional(1.0), r"\(L,\) or \(B, L\)"),
        (lambda: fractional([1, 2.0**23]), "at most 2"),
        (lambda: fractional([1, 1], 0), "denominator"),
        (lambda: Fractional(0), "denominator"),
    ],
)
def test_what_is_no_fraction(call, message):
    with pytest.raises(ValueError, match=message):
        call()
