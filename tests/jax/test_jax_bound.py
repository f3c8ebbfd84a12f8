"""One forward pass in JAX: results, what is made once, what may be traced, what is refused."""

from dataclasses import dataclass

import numpy as np
import pytest
from sample import long, some

import posenc
from posenc import Tokens
from posenc.apply.feature_needs import reads_hidden
from posenc.schemes import FoX, Inkling, LearnedRoPE

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import posenc_jax  # noqa: E402

HEADS, DIM, LAYERS, LENGTH = 2, 8, 3, 12
EACH = {
    "alibi": posenc.ALiBi(HEADS),
    "t5": posenc.T5Bias(HEADS, causal=True),
    "rope": posenc.RoPE(DIM),
    "learned-rope": LearnedRoPE(DIM),
    "fox": FoX(HEADS, 16),
}


def vectors(length=LENGTH, dtype="float32"):
    rng = np.random.default_rng(0)
    sizes = [(2, length, HEADS, DIM)] * 3 + [(2, length, 16)]
    return [
        [jnp.asarray(rng.standard_normal(size), dtype) for size in sizes] for _ in range(LAYERS)
    ]


def of(scheme):
    return posenc_jax.Positions.init(scheme, LAYERS, jax.random.key(0))


def alone(positions, each):
    outs = []
    for position, (q, k, v, x) in zip(positions, each, strict=True):
        tokens = Tokens(x=x) if reads_hidden(position.scheme) else None
        outs.append(position.attend(q, k, v, causal=True, tokens=tokens))
    return outs


def together(positions, each, wrap=lambda function: function):
    bound = positions.bind(causal=True)

    def run(attend, q, k, v, x):
        return wrap(lambda q, k, v, x: attend(q, k, v, x=x))(q, k, v, x)

    return [run(attend, *layer) for attend, layer in zip(bound, each, strict=True)]


def loss_of(function, **options):
    def loss(positions, each):
        outs = function(positions, each, **options)
        return sum((out * (n + 1)).sum() for n, out in enumerate(outs))

    return loss


@pytest.mark.parametrize("name", some(EACH, ["fox"], long))
def test_gradients_are_those_of_calls(name):
    """Also where ``jax.checkpoint`` traces a layer on its own."""
    given = of(EACH[name]), vectors()
    expected, *others = (
        jax.jit(jax.grad(loss, (0, 1)))(*given)
        for loss in (loss_of(alone), loss_of(together), loss_of(together, wrap=jax.checkpoint))
    )
    for found in others:  # the terms are below 100, and are summed in another order
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@long
@pytest.mark.parametrize("name", some(EACH, ["t5"], long))
def test_values_are_those_of_calls(name):
    """Bit for bit, operation by operation: JAX compiles each for itself, for seconds."""
    positions, each = of(EACH[name]), vectors()
    for one, other in zip(alone(positions, each), together(positions, each), strict=True):
        np.testing.assert_array_equal(one, other)


@dataclass(frozen=True)
class Turning(posenc.RoPE):
    """RoPE that counts how often its angles are computed."""

    calls = 0

    def rotary(self, pos, *, dtype, params, xp):
        type(self).calls += 1
        return super().rotary(pos, dtype=dtype, params=params, xp=xp)


def test_angles_are_made_once():
    positions, each = of(Turning(DIM)), vectors()
    Turning.calls = 0
    jax.make_jaxpr(together)(positions, each)
    assert Turning.calls == 1
    jax.make_jaxpr(alone)(positions, each)
    assert Turning.calls == 1 + LAYERS


@long
def test_a_pass_may_be_handed_into_a_traced_function():
    """It is a pytree; what it made outside is not read inside."""
    positions, each = of(EACH["t5"]), vectors()
    tokens = posenc.positions.packed([5, 7])
    bound = positions.bind(tokens, causal=True)
    expected = [attend(*layer[:3]) for attend, layer in zip(bound, each, strict=True)]

    @jax.jit
    def run(bound, each):
        return [attend(*layer[:3]) for attend, layer in zip(bound, each, strict=True)]

    for one, other in zip(expected, run(bound, each), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    gradient = jax.grad(lambda bound: sum(out.sum() for out in run(bound, each)))(
        positions.bind(causal=True)
    )
    assert np.any(np.asarray(jax.tree.leaves(gradient)[0]))


@long
def test_layers_in_a_scan():
    positions, (layer, *_) = of(EACH["rope"]), vectors()
    bound = positions.bind(causal=True)
    expected = bound[0](*layer[:3])

    def body(carry, _):
        return carry, bound[1](*carry[:3])

    _, outs = jax.lax.scan(body, layer, None, length=2)
    np.testing.assert_allclose(outs[1], expected, rtol=1e-6, atol=1e-6)


@long
def test_decoding_with_keys_that_a_cache_holds_transformed():
    positions, each = of(EACH["rope"]), vectors()
    whole = together(positions, each)
    bound = positions.bind(Tokens(jnp.arange(LENGTH)), Tokens(jnp.arange(8, LENGTH)), causal=True)
    before = positions.bind(Tokens(jnp.arange(8)))
    for layer, (q, k, v, _) in enumerate(each):
        keys = [before[layer].transform_keys(k[:, :8]), bound[layer].transform_keys(k[:, 8:])]
        out = bound[layer](q[:, 8:], jnp.concatenate(keys, 1), v, k_transformed=True)
        np.testing.assert_allclose(out, whole[layer][:, 8:], rtol=1e-5, atol=1e-5)


def test_hidden_states_of_queries_are_those_of_the_last_tokens():
    (q, k, v, x), *_ = vectors()
    for scheme, at in (("fox", 2), ("inkling", LENGTH - 1)):
        positions, where = of(EACH.get(scheme) or Inkling(HEADS, 16)), jnp.asarray([at])
        bound = positions.bind(Tokens(jnp.arange(LENGTH)), Tokens(where), causal=True)

        @jax.jit  # one program, which is faster to compile
        def both(positions, bound, last, q, k, v, x):
            whole = positions[0].attend(q, k, v, causal=True, tokens=Tokens(x=x))
            return whole, bound[0](last, k, v, x=x)

        whole, out = both(positions, bound, q[:, where], q, k, v, x)
        np.testing.assert_allclose(out, whole[:, where], rtol=1e-5, atol=1e-5)
    bound = positions.bind(Tokens(jnp.arange(LENGTH)), Tokens(where - 1), causal=True)
    with pytest.raises(ValueError, match=r"queries\.pos are not the last of tokens\.pos"):
        bound[0](q[:, :1], k, v, x=x)


@long
def test_a_pass_is_of_one_shape():
    bound = of(EACH["alibi"]).bind(causal=True)
    bound[0](*vectors()[0][:3])
    with pytest.raises(ValueError, match=r"queries 12, .*queries 11, .*bind again"):
        bound[1](*vectors(11)[1][:3])
    with pytest.raises(TypeError, match=r"queries must be posenc\.Tokens, got list"):
        of(EACH["alibi"]).bind(queries=[1])
