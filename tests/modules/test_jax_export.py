"""``jax.export``: one program for every length, saved and loaded, with the bits of ``jax.jit``."""

import numpy as np
import pytest

import posenc

jax = pytest.importorskip("jax")
pytest.importorskip("flatbuffers", reason="flatbuffers is not installed; .ci/libraries runs this")

import posenc_jax  # noqa: E402

HEADS, DIM = 2, 8
SIZES = {"num_heads": HEADS, "head_dim": DIM, "hidden_dim": 16, "train_len": 32}


def vectors(length):
    q, k, v = np.random.default_rng(length).standard_normal((3, 2, length, HEADS, DIM))
    return [x.astype(np.float32) for x in (q, k, v)]


@pytest.mark.parametrize("name", ["alibi", "rope", "t5"])
def test_a_loaded_program_serves_every_length(name):
    """``"auto"`` takes ``"xla"`` there, as nothing else serves a length without a number."""
    scheme = posenc.make(name, **SIZES)
    positions = posenc_jax.Positions.init(scheme, 2, jax.random.key(0))
    leaves, tree = jax.tree.flatten(positions)

    def run(leaves, q, k, v, pos, implementation="auto"):
        bound = jax.tree.unflatten(tree, leaves).bind(
            posenc.Tokens(pos=pos), causal=True, implementation=implementation
        )
        for attend in bound:
            q = attend(q, k, v)
        return q

    (n,) = jax.export.symbolic_shape("n")
    of_vectors = jax.ShapeDtypeStruct((2, n, HEADS, DIM), np.float32)
    pos = jax.ShapeDtypeStruct((n,), np.int32)
    program = jax.export.export(jax.jit(run))(leaves, of_vectors, of_vectors, of_vectors, pos)
    loaded = jax.export.deserialize(program.serialize())
    for length, first in ((3, 0), (21, 1_000_000)):
        given = (leaves, *vectors(length), np.arange(length, dtype=np.int32) + first)
        right = jax.jit(run, static_argnames="implementation")(*given, implementation="xla")
        np.testing.assert_array_equal(loaded.call(*given), right)


def test_a_fixed_length_takes_the_tiles():
    scheme = posenc.ALiBi(HEADS)
    q, k, v = vectors(24)

    @jax.jit
    def run(q, k, v):
        return posenc_jax.attention(q, k, v, scheme, causal=True, implementation="chunked")

    loaded = jax.export.deserialize(jax.export.export(run)(q, k, v).serialize())
    np.testing.assert_array_equal(loaded.call(q, k, v), run(q, k, v))
