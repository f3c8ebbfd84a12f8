"""2-D ALiBi: golden distances, both metrics, and text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.positions import grid
from posenc.schemes import ALiBi2D


def bias_of(scheme, places):
    """The bias ``(H, L, L)``, from scores of queries that are 0."""
    length, heads = len(places), scheme.num_heads
    zeros, values = (
        np.zeros((1, heads, length, 8)),
        np.broadcast_to(np.eye(length), (1, heads, length, length)),
    )
    weights = posenc.attention(
        zeros, zeros, values, scheme, posenc.init_params(scheme),
        tokens=posenc.Tokens(pos=np.arange(length), places=places),
    )[0]  # fmt: skip
    log = np.log(weights)
    return log - np.diagonal(log, axis1=1, axis2=2)[..., None]  # a place is at distance 0 of itself


@pytest.mark.parametrize(
    ("metric", "distances"),
    [("euclidean", [0, 1, 1, math.sqrt(2), 2, math.sqrt(5)]), ("city_block", [0, 1, 1, 2, 2, 3])],
)
def test_distances_from_a_corner(metric, distances):
    slopes = np.asarray([2.0**-4, 2.0**-8])  # the paper's, for two heads
    found = bias_of(ALiBi2D(2, metric), grid(3, 2))[:, 0]
    np.testing.assert_allclose(found, -slopes[:, None] * np.asarray(distances), atol=1e-14)


def test_slopes_are_those_of_alibi():
    assert ALiBi2D(12).head_slopes() == posenc.ALiBi(12).head_slopes()
    assert (
        ALiBi2D(3, slopes="geometric").head_slopes() == posenc.ALiBi(3, "geometric").head_slopes()
    )
    learned = posenc.init_params(ALiBi2D(4, learned=True))
    np.testing.assert_array_equal(learned["slopes"], np.float32(posenc.ALiBi(4).head_slopes()))


@pytest.mark.parametrize(("metric", "times"), [("euclidean", math.sqrt(2)), ("city_block", 2)])
def test_text_has_the_bias_of_alibi_times_a_number(metric, times):
    q, k, v = (normal((1, 4, 9, 8), n) for n in range(3))
    found = posenc.attention(q, k, v, ALiBi2D(4, metric), causal=True)
    slopes = [times * slope for slope in posenc.ALiBi(4).head_slopes()]
    expected = posenc.attention(q, k, v, posenc.ALiBi(4, slopes), causal=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_errors():
    with pytest.raises(ValueError, match="metric"):
        ALiBi2D(4, "manhattan")
    with pytest.raises(ValueError, match="slopes has 2 values for num_heads=4"):
        ALiBi2D(4, slopes=[1.0, 2.0])
