"""Positions of every integer dtype, from either library, up to where differences still fit."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import HAS

import posenc
from posenc.testing.tolerances import attention_bound

ALIBI = posenc.ALiBi(num_heads=2)
FAR = 2**30 - 1
ROUTES = ["numpy", *(name for name in ("torch", "jax") if HAS[name])]
TWO = 2 * attention_bound("float32", channels=4, keys=2)  # two results


def attend(route, pos, k_pos=None, **keywords):
    """Attention of two positions, two heads: the positions stay NumPy arrays."""
    x = np.random.default_rng(0).standard_normal((1, 2, 2, 4)).astype(np.float32)
    keywords |= {
        "tokens": posenc.Tokens(pos=pos if k_pos is None else k_pos),
        "queries": posenc.Tokens(pos=pos),
    }
    if route == "numpy":
        return posenc.attention(x, x, x, ALIBI, **keywords)
    if route == "torch":
        import torch

        import posenc_torch

        return posenc_torch.attention(*[torch.tensor(x)] * 3, ALIBI, **keywords).numpy()
    import posenc_jax

    x = np.swapaxes(x, 1, 2)
    return np.swapaxes(posenc_jax.attention(x, x, x, ALIBI, **keywords), 1, 2)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("route", ROUTES)
def test_numpy_positions_of_any_integer_dtype(route, dtype):
    pos = np.asarray([0, 100], dtype=dtype)
    expected = attend("numpy", pos.astype(np.int64), causal=True)
    np.testing.assert_allclose(attend(route, pos, causal=True), expected, atol=TWO)


@pytest.mark.parametrize("route", ROUTES)
def test_the_farthest_positions_have_the_right_distance(route):
    pos = np.asarray([-FAR - 1, FAR])
    near = attend(route, pos, window=2)
    np.testing.assert_allclose(near, attend(route, np.asarray([0, 5]), window=2), atol=TWO)


@pytest.mark.parametrize("wrong", [FAR + 1, -FAR - 2, 2**32 + 5, -(2**31)])
@pytest.mark.parametrize("route", ROUTES)
def test_positions_beyond_are_refused(route, wrong):
    for side, given in (("queries", ([0, wrong], [0, 1])), ("tokens", ([0, 1], [0, wrong]))):
        message = rf"{side}.pos holds {wrong}, accepted: -2\*\*30 .. 2\*\*30 - 1"
        with pytest.raises(ValueError, match=message):
            attend(route, *map(np.asarray, given))


def test_unsigned_positions_of_jax_are_refused_before_they_wrap():
    jnp = pytest.importorskip("jax.numpy")
    pos = jnp.asarray([0, 3 * 2**30], dtype=jnp.uint32)
    with pytest.raises(ValueError, match=r"tokens\.pos holds 3221225472"):
        attend("jax", pos)


def test_segments_may_be_any_integers():
    seg = np.asarray([-(2**31), 2**31 - 1], dtype=np.int32)
    x = np.ones((1, 2, 2, 4), np.float32)
    out = posenc.attention(
        x, x, x * np.asarray([1.0, 2.0])[:, None], ALIBI, tokens=posenc.Tokens(seg=seg)
    )
    np.testing.assert_array_equal(out[0, 0, :, 0], [1, 2])
