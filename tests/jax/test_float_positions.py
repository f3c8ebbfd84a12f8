"""Which biases may read float32 positions: those that compute the same from them."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytest.importorskip("posenc_jax")

from posenc_jax.fused.float_positions import EXACT, exact_in_float32  # noqa: E402

M = 0.3
FAR = 2**20
EXACT_BIASES = {
    "difference": lambda q, k: -M * jnp.abs(q - k),
    "compared": lambda q, k: jnp.where(jnp.abs(q - k) < 7, -M * (q - k), -jnp.inf),
    "logarithm": lambda q, k: -jnp.log1p(M * (q - k + 3).astype(jnp.float32)),
    "clipped": lambda q, k: M * jnp.clip(q - k, -5, FAR),
    "sign": lambda q, k: M * jnp.sign(q - k),
    "few bits of a sign": lambda q, k: M * jnp.sign(q - k).astype(jnp.int8),
    "inside a call": lambda q, k: M * jax.jit(lambda d: jnp.maximum(d, -d))(q - k),
    "squared after": lambda q, k: M * jnp.square((q - k).astype(jnp.float32)),
    "no position": lambda q, k: jnp.zeros((1, 1)),
}
OTHER_BIASES = {
    "squared before": lambda q, k: M * jnp.square(q - k),
    "product": lambda q, k: M * (q * k),
    "large constant": lambda q, k: M * (q - (EXACT + 1)),
    "remainder": lambda q, k: M * ((q - k) % 2),
    "quotient": lambda q, k: M * ((q - k) // 3),
    "bits": lambda q, k: M * (q & k),
    "too few bits": lambda q, k: M * (q - k).astype(jnp.int16),
    "no sign": lambda q, k: M * (q - k).astype(jnp.uint32),
    "table": lambda q, k: jnp.arange(9.0)[jnp.clip(q - k, 0, 8)],
}


def exact(bias, furthest):
    pos = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return exact_in_float32(jax.make_jaxpr(bias)(pos, pos), [furthest] * 2)


@pytest.mark.parametrize("name", EXACT_BIASES)
def test_the_same_from_floats(name):
    """At positions up to the bound, to the last bit."""
    bias = EXACT_BIASES[name]
    assert exact(bias, FAR)
    positions = np.array([0, 1, 7, 1000, FAR - 1, FAR], np.int32)
    q, k = positions[:, None], positions
    from_floats = bias(*(jnp.asarray(a, jnp.float32) for a in (q, k)))
    np.testing.assert_array_equal(from_floats, bias(jnp.asarray(q), jnp.asarray(k)))


@pytest.mark.parametrize("name", OTHER_BIASES)
def test_integers_that_floats_do_not_replace(name):
    assert not exact(OTHER_BIASES[name], FAR)


def test_the_bound_counts_every_step():
    """A difference of positions may be twice as far as each; at ``2**24`` it is still exact."""
    assert exact(lambda q, k: M * (q - k), EXACT // 2)
    assert not exact(lambda q, k: M * (q - k), EXACT // 2 + 1)
    assert exact(lambda q, k: M * (q * 3), EXACT // 3)
    assert not exact(lambda q, k: M * (q * 4), EXACT // 3)
    assert exact(lambda q, k: M * jnp.square(q), 2**12)
    assert not exact(lambda q, k: M * jnp.square(q), 2**12 + 1)
