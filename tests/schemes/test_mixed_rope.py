"""Mixed RoPE: rope-vit's formula and first values, and exact angles."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from frameworks import FRAMEWORKS
from sample import long, some
from subjects import normal

import posenc
from posenc.angles.learned import sincos_of_sum
from posenc.positions import grid
from posenc.schemes import MixedRoPE
from posenc.testing.tolerances import rounding_bound

HEADS, DIM = 3, 16


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_it_is_the_formula_of_rope_vit(layout):
    """Each pair of a head is a complex number, times ``exp(i (x f_x + y f_y))``."""
    scheme = MixedRoPE(HEADS, DIM, layout=layout)
    f = normal((HEADS, DIM // 2, 2), 0, "float32")
    x, places = normal((2, HEADS, 15, DIM), 1), grid(3, 5)[:, ::-1]
    found = posenc.transform(
        scheme, x, np.zeros(15, int), params={"frequencies": f}, role="key", places=places
    )
    angle = places[:, 0, None] * f[:, None, :, 0] + places[:, 1, None] * f[:, None, :, 1]
    first = slice(DIM // 2) if layout == "half" else slice(0, DIM, 2)
    second = slice(DIM // 2, DIM) if layout == "half" else slice(1, DIM, 2)
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
    expected = np.empty_like(found)
    expected[..., first], expected[..., second] = z.real, z.imag
    # The angles of the expectation, up to 18, are two products and a sum.
    bound = rounding_bound(4 + 3 * 18, 4, "float64")
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("axes", [2, 4])
def test_first_values_are_axial_frequencies_in_a_random_frame(axes):
    f = posenc.init_params(MixedRoPE(HEADS, DIM, axes))["frequencies"].astype(float)
    each = DIM // 2 // axes
    blocks = f.reshape(HEADS, axes, each, axes)
    sizes = np.linalg.norm(blocks, axis=-1)
    np.testing.assert_allclose(sizes, 10.0 ** (-np.arange(each) / each) * np.ones_like(sizes), 1e-6)
    frames = blocks[:, :, 0]
    for frame in frames:
        np.testing.assert_allclose(frame @ frame.T, np.eye(axes), atol=1e-6)
        assert np.linalg.det(frame) == pytest.approx(1)  # a rotation, no reflection
    np.testing.assert_allclose(
        blocks / sizes[..., None], frames[:, :, None] + 0 * blocks, atol=1e-6
    )
    assert np.abs(frames[0] - frames[1]).max() > 0.01


def test_two_axes_start_as_rope_vit():
    """``f_x = mag (cos phi, cos(phi + pi/2))``, ``f_y = mag (sin phi, sin(phi + pi/2))``."""
    f = posenc.init_params(MixedRoPE(HEADS, DIM))["frequencies"]
    mag = 10.0 ** (-4 * np.arange(DIM // 4) / DIM)
    for head in f:
        phi = np.arctan2(head[0, 1], head[0, 0])
        for n, values in enumerate((np.cos, np.sin)):
            expected = np.concatenate([mag * values(phi), mag * values(phi + np.pi / 2)])
            np.testing.assert_allclose(head[:, n], expected, atol=1e-6)


POSITIONS = [0, 1, -1, 400, 2**24, -(2**24) + 1]
FREQUENCIES = [1.0, -0.1, 1e-5, -1e-7, 2047.5, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", some(FRAMEWORKS, ["numpy", "torch"], long))
def test_learned_angles_are_exact(name, dtype):
    if dtype not in FRAMEWORKS[name].dtypes:
        pytest.skip(f"{name} has no {dtype}")

    def program(xp, arrays):
        p, work = arrays["p"][:, None], getattr(xp, dtype)
        return xp.stack(sincos_of_sum([(p, arrays["f"]), (3 - p, arrays["g"])], dtype=work, xp=xp))

    f = np.asarray(FREQUENCIES, dtype)
    arrays = {"p": np.asarray(POSITIONS, np.int32), "f": f, "g": (0.7 * f).astype(dtype)}
    compiler = "jit" if name == "jax" else None  # without it, each operation is compiled alone
    found = FRAMEWORKS[name].evaluate(program, arrays, compiler=compiler).values
    tolerance = 1.5e-7 if dtype == "float32" else 4e-16
    with mpmath.workdps(40):
        for n, p in enumerate(POSITIONS):
            for k in range(len(f)):
                one, other = (mpmath.mpf(float(arrays[name][k])) for name in "fg")
                angle = p * one + (3 - p) * other
                assert abs(float(found[0, n, k]) - mpmath.sin(angle)) <= tolerance
                assert abs(float(found[1, n, k]) - mpmath.cos(angle)) <= tolerance


@pytest.mark.parametrize(
    "name", some([n for n in FRAMEWORKS if FRAMEWORKS[n].differentiable], ["torch"], long)
)
def test_frequencies_learn(name):
    """The derivative of ``sin(p f)`` is ``p cos(p f)``, though digits of ``f`` are integers."""
    p = np.asarray([3, -2, 100, 7, 0, 1], np.int32)

    def program(xp, arrays):
        sin, _ = sincos_of_sum([(arrays["p"], arrays["f"])], dtype=xp.float32, xp=xp)
        return sin

    arrays = {"p": p, "f": np.asarray(FREQUENCIES, np.float32)}
    _, gradients = FRAMEWORKS[name].gradients(
        program, arrays, np.ones(6, np.float32), compiler="jit" if name == "jax" else None
    )
    expected = p * np.cos(p * arrays["f"].astype(float))
    np.testing.assert_allclose(gradients["f"], expected, rtol=0, atol=rounding_bound(4, 100))


def test_text_turns_by_the_sum_of_frequencies():
    scheme = MixedRoPE(1, 4)
    f = np.asarray([[[0.5, 0.25], [0.0, -0.125]]], np.float32)
    x = np.asarray([[[[1.0, 1.0, 0.0, 0.0]]]])
    found = posenc.transform(scheme, x, np.asarray([8]), params={"frequencies": f}, role="query")
    expected = [np.cos(6.0), np.cos(-1.0), np.sin(6.0), np.sin(-1.0)]
    np.testing.assert_allclose(found[0, 0, 0], expected, rtol=1e-14)


def test_errors():
    with pytest.raises(ValueError, match="head_dim must be a multiple of 4, got 6"):
        MixedRoPE(2, 6)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        MixedRoPE(0, 8)
    with pytest.raises(ValueError, match="base"):
        MixedRoPE(2, 8, base=0)


def test_lie_rope_of_commuting_blocks_is_mixed_rope_in_another_basis():
    """LieRE turns by ``exp(sum_a p_a A_a)``, here with skew ``A_a`` of all channels at once."""
    f, places = normal((HEADS, DIM // 2, 2), 0), grid(3, 5)
    q, k = normal((2, HEADS, 15, DIM), 2)
    basis = np.linalg.qr(normal((HEADS, DIM, DIM), 3))[0]
    turn = np.zeros((HEADS, 2, DIM, DIM))
    at = 2 * np.arange(DIM // 2)
    turn[:, :, at + 1, at] = np.swapaxes(f, 1, 2)
    generators = (
        basis[:, None] @ (turn - np.swapaxes(turn, 2, 3)) @ np.swapaxes(basis, 1, 2)[:, None]
    )
    assert np.allclose(generators[:, 0] @ generators[:, 1], generators[:, 1] @ generators[:, 0])
    values, vectors = np.linalg.eigh(1j * np.einsum("la,hade->lhde", places, generators))
    turned = (vectors * np.exp(-1j * values)[..., None, :]) @ np.conj(np.swapaxes(vectors, 2, 3))
    q_lie, k_lie = (np.einsum("lhde,hle->hld", turned.real, x) for x in (q, k))
    scheme = MixedRoPE(HEADS, DIM, layout="interleaved")
    q_mixed, k_mixed = (
        posenc.transform(
            scheme, (x @ basis)[None], np.zeros(15, int), params={"frequencies": f}, role="key",
            places=places,
        )[0]
        for x in (q, k)
    )  # fmt: skip
    expected = q_mixed @ np.swapaxes(k_mixed, 1, 2)
    np.testing.assert_allclose(q_lie @ np.swapaxes(k_lie, 1, 2), expected, atol=1e-10)
