"""``posenc.rotary`` and ``Tokens`` in JAX: pytrees, through every transformation."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc
import posenc_jax
from posenc.schemes import MixedRoPE

AT = jnp.arange(6)
X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 6, 8)), jnp.float32)


def turn(scheme, x, rotary=None, params=None):
    return posenc.transform(scheme, x, AT, role="query", params=params, rotary=rotary)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_rotary_is_an_argument_of_compiled_and_mapped_functions(layout):
    rope = posenc.RoPE(8, layout=layout)
    rotary, whole = posenc.rotary(rope, AT), turn(rope, X)
    leaves, _ = jax.tree.flatten(rotary)
    assert [leaf.shape for leaf in leaves] == [(6, 4)] * 2
    jitted = jax.jit(lambda x, rotary: turn(rope, x, rotary))
    np.testing.assert_allclose(jitted(X, rotary), whole, atol=1e-6)
    mapped = jax.jit(jax.vmap(lambda x, rotary: turn(rope, x, rotary), (0, None)))
    np.testing.assert_allclose(mapped(X, rotary), whole, atol=1e-6)
    _, scanned = jax.lax.scan(lambda r, x: (r, turn(rope, x, r)), rotary, X)
    np.testing.assert_allclose(scanned, whole, atol=1e-6)


@pytest.mark.long
def test_tables_are_mapped_over_batches_of_positions():
    rope, at = posenc.RoPE(8), jnp.stack([AT, AT + 3, 2 * AT])
    one = jax.jit(jax.vmap(lambda x, at: posenc.transform(rope, x, at, role="key")))
    whole = posenc.transform(rope, X, at, role="key")
    np.testing.assert_allclose(one(X, at), whole, atol=1e-6)


def test_learned_frequencies_get_gradients_through_a_rotary():
    scheme = MixedRoPE(2, 8, axes=1)
    params = {n: jnp.asarray(a) for n, a in posenc.init_params(scheme).items()}

    def loss(params, before):
        rotary = posenc.rotary(scheme, AT, params) if before else None
        return (turn(scheme, X, rotary, params) ** 2 * X).sum()

    own, shared = (jax.jit(jax.grad(loss), static_argnums=1)(params, b) for b in (False, True))
    assert jnp.abs(own["frequencies"]).max() > 0
    np.testing.assert_allclose(own["frequencies"], shared["frequencies"], rtol=1e-5)


@pytest.mark.long
def test_layers_share_a_rotary():
    positions = posenc_jax.Positions.init([posenc.RoPE(8), posenc.NoPE()], 4, jax.random.key(0))
    rotaries, q = positions.rotary(AT), X.swapaxes(1, 2)
    assert rotaries[0] is rotaries[2]
    assert rotaries[1] is None
    attend = partial(positions[2].attend, q, q, q, implementation="reference")
    rotary = posenc.Tokens(rotary=rotaries[2])
    for given in ({"tokens": rotary}, {"queries": rotary}, {"tokens": rotary, "queries": rotary}):
        np.testing.assert_array_equal(attend(**given), attend())


@pytest.mark.long
def test_tokens_are_a_pytree():
    """With all that they hold, as arguments of compiled and mapped functions."""
    rope, q = posenc.RoPE(8), X.swapaxes(1, 2)
    at = jnp.stack([AT, AT + 3, 2 * AT])
    tokens = posenc.Tokens(
        pos=at, seg=at // 4, exists=at > 0, x=X[:, 0], rotary=posenc.rotary(rope, at)
    )
    leaves, tree = jax.tree.flatten(replace(tokens, features={"c": X[..., 0]}))
    assert len(leaves) == 7
    again = jax.tree.unflatten(tree, leaves)
    assert again.pos is at
    assert again.rotary.scheme == rope

    def attend(q, tokens):
        return posenc_jax.attention(q, q, q, rope, causal=True, tokens=tokens)

    # Compiled whole: JAX takes longer to compile each operation by itself.
    expected = jax.jit(lambda q: attend(q, tokens))(q)
    np.testing.assert_allclose(jax.jit(attend)(q, tokens), expected, atol=1e-6)
    one = jax.jit(jax.vmap(lambda q, tokens: attend(q[None], tokens)[0]))
    np.testing.assert_allclose(one(q, replace(tokens, x=None)), expected, atol=1e-6)

    @jax.jit
    def scanned(tokens, q):
        return jax.lax.scan(lambda kept, q: (kept, attend(q, kept[-2:])), tokens, q)[1]

    last = jax.jit(lambda q: attend(q, tokens[-2:]))(q[:, -2:])
    np.testing.assert_allclose(scanned(tokens, q[None, :, -2:])[0], last, atol=1e-6)
