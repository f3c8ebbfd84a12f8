"""A table by distance at all pairs, and its transpose, which adds rows up."""

import numpy as np
import pytest

import posenc

jax = pytest.importorskip("jax")
jnp, jet = jax.numpy, pytest.importorskip("jax.experimental.jet")
posenc_jax = pytest.importorskip("posenc_jax")
unfold = pytest.importorskip("posenc_jax.unfold").unfold

HEADS, DISTANCES = 3, 12
ROWS = [1, 5, DISTANCES]


def integers(*shape):
    """Numbers whose sums are exact in float32."""
    return jnp.asarray(np.random.default_rng(0).integers(-9, 10, shape), "float32")


def distances(rows):
    """The distance at each pair, counted from the lowest."""
    return rows - 1 - np.arange(rows)[:, None] + np.arange(DISTANCES - rows + 1)


@pytest.mark.parametrize("rows", ROWS)
def test_values_and_gradient_are_those_of_an_index_by_pair(rows):
    table, at = integers(HEADS, DISTANCES), distances(rows)
    values, transpose = jax.vjp(lambda table: unfold(table, rows), table)
    np.testing.assert_array_equal(values, np.asarray(table)[:, at])
    d_values = integers(*values.shape)
    expected = np.zeros((HEADS, DISTANCES), "float32")
    np.add.at(expected, (slice(None), at), np.asarray(d_values))
    np.testing.assert_array_equal(transpose(d_values)[0], expected)
    compiled = jax.jit(jax.grad(lambda table: jnp.sum(unfold(table, rows) * d_values)))
    np.testing.assert_array_equal(compiled(table), expected)


def test_derivatives_of_every_kind():
    """Of the sum of squares at all pairs, whose second derivatives count the pairs."""
    rows = 5
    table = integers(DISTANCES)
    pairs = np.bincount(distances(rows).reshape(-1))

    def squares(table):
        return jnp.sum(unfold(table, rows) ** 2)

    for twice in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        np.testing.assert_array_equal(jax.jit(twice(squares))(table), np.diag(2.0 * pairs))


def test_a_batch_on_any_axis():
    """Of tables, and of gradients of one table."""
    axis = 2
    tables = integers(2, HEADS, DISTANCES)
    batched = jax.vmap(jax.grad(lambda t: jnp.sum(unfold(t, 5) ** 2)), in_axes=axis, out_axes=axis)
    expected = 2 * np.bincount(distances(5).reshape(-1)) * np.asarray(tables)
    np.testing.assert_array_equal(batched(jnp.moveaxis(tables, 0, axis)),
                                  np.moveaxis(expected, 0, axis))  # fmt: skip
    _, transpose = jax.vjp(lambda t: unfold(t, 5), tables[0])
    many = integers(4, HEADS, 5, DISTANCES - 4)
    one_by_one = [transpose(d_values)[0] for d_values in many]
    np.testing.assert_array_equal(jax.vmap(transpose)(many)[0], one_by_one)


def test_the_gradient_of_a_dense_bias_scatters_no_rows():
    """On a CPU, where scattering takes seven times as long; of T5 only its buckets are scattered.

    What other devices would run is lowered, not compiled.
    """
    heads, length = 2, 256
    scheme, pos = posenc.T5Bias(heads), np.arange(length)
    params = {"table": integers(heads, 32)}
    _, transpose = jax.vjp(lambda params: posenc.bias(scheme, pos, pos, params, xp=jnp), params)
    d_bias = integers(heads, length, length)
    lowered = {
        platform: jax.jit(transpose).trace(d_bias).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    scatters = {platform: text.count('"stablehlo.scatter"(') for platform, text in lowered.items()}
    assert scatters == {"cpu": 1, "cuda": 2}
    assert "stablehlo.while" in lowered["cpu"]
    assert "stablehlo.while" not in lowered["cuda"]
    bucket = np.asarray(scheme.bucket(pos[None, :] - pos[:, None], xp=np))
    expected = [np.bincount(bucket.reshape(-1), np.asarray(d).reshape(-1), 32) for d in d_bias]
    np.testing.assert_array_equal(transpose(d_bias)[0]["table"], np.asarray(expected))


def test_without_jit_and_on_a_mesh_its_operations_are_those_of_jax():
    """These have no rule for arrays of an explicit mesh, and an own one would need its compiler."""
    table, expected = integers(HEADS, DISTANCES), np.bincount(distances(5).reshape(-1))

    def total(table):
        return jnp.sum(unfold(table, 5))

    with jax.disable_jit():
        np.testing.assert_array_equal(jax.grad(total)(table), np.tile(expected, (HEADS, 1)))
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.use_mesh(mesh) if not hasattr(jax, "set_mesh") else jax.set_mesh(mesh):
        on_mesh = jax.device_put(table, jax.sharding.PartitionSpec("heads"))
        np.testing.assert_array_equal(jax.grad(total)(on_mesh), np.tile(expected, (HEADS, 1)))


def test_a_taylor_series():
    table = integers(DISTANCES)
    value, (first,) = jet.jet(lambda t: unfold(t, 5), (table,), ((2 * table,),))
    np.testing.assert_array_equal(first, 2 * value)
