"""Forward mode and second derivatives in JAX: right, or one clear error, at any length."""

import numpy as np
import pytest
from sample import long, some

import posenc

jax = pytest.importorskip("jax")
jnp = jax.numpy
posenc_jax = pytest.importorskip("posenc_jax")

ONE_BLOCK, MORE = 20, 300
BY_HEAD = 2000  # tokens, from which on heads come one after the other


def problem(length, implementation):
    """A loss, its arguments, and a direction."""
    scheme, rng = posenc.ALiBi(2, learned=True), np.random.default_rng(0)
    tensors = [jnp.asarray(rng.standard_normal((1, length, 2, 4)), "float32") for _ in range(3)]
    at = (*tensors, {"slopes": jnp.asarray([0.5, 0.1])})

    def loss(at):
        *tensors, params = at
        out = posenc_jax.attention(
            *tensors, scheme, params, causal=True, implementation=implementation
        )
        return jnp.sum(jnp.sin(out))

    return loss, at, jax.tree.map(jnp.ones_like, at)


def forward(loss, at, along):
    return jax.jvp(loss, (at,), (along,))[1]


def forward_over_reverse(loss, at, along):
    return jax.jvp(jax.grad(loss), (at,), (along,))[1]


def reverse_over_reverse(loss, at, along):
    def directional(at):
        products = jax.tree.map(jnp.vdot, jax.grad(loss)(at), along)
        return sum(jax.tree.leaves(products))

    return jax.grad(directional)(at)


def run(how, length, implementation, compiled):
    loss, at, along = problem(length, implementation)
    function = lambda at, along: how(loss, at, along)  # noqa: E731
    return (jax.jit(function) if compiled else function)(at, along)


@pytest.mark.parametrize(
    "compiled", [pytest.param(True, id="jit"), pytest.param(False, id="eager", marks=long)]
)
@pytest.mark.parametrize("length", some([ONE_BLOCK, MORE, BY_HEAD], [ONE_BLOCK], long))
@pytest.mark.parametrize(
    ("how", "message"), [(forward, "forward mode"), (reverse_over_reverse, "second derivatives")]
)
def test_a_derivative_that_chunked_lacks_is_one_clear_error(how, message, length, compiled):
    with pytest.raises(
        NotImplementedError,
        match=f"implementation 'chunked' .*{message}.*implementation='reference'",
    ):
        run(how, length, "auto", compiled)


def test_forward_mode_within_a_vmap_is_an_error_too():
    loss, at, along = problem(ONE_BLOCK, "chunked")
    batched = jax.tree.map(lambda a: a[None], (at, along))
    with pytest.raises((NotImplementedError, TypeError), match=r"forward.mode"):
        jax.vmap(lambda at, along: forward(jax.jit(loss), at, along))(*batched)


@long
@pytest.mark.parametrize("compiled", [True, False])
def test_the_gradient_of_a_vmap_is_that_of_a_sum(compiled):
    loss, at, _ = problem(ONE_BLOCK, "chunked")
    batched = jax.tree.map(lambda a: jnp.stack([a, a / 2]), at)
    of_vmap = jax.grad(lambda at: jnp.sum(jax.vmap(loss)(at)))
    result = (jax.jit(of_vmap) if compiled else of_vmap)(batched)
    for n in range(2):
        alone = jax.grad(loss)(jax.tree.map(lambda a, n=n: a[n], batched))
        for one, other in zip(*map(jax.tree.leaves, (result, alone)), strict=True):
            np.testing.assert_allclose(one[n], other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", some([ONE_BLOCK, MORE, BY_HEAD], [ONE_BLOCK], long))
def test_forward_over_reverse_is_right(length):
    result, expected = (
        run(forward_over_reverse, length, implementation, compiled=True)
        for implementation in ("chunked", "reference")
    )
    for one, other in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        # A slope's second derivative sums over all pairs.
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def mixed(loss, at, along):
    """The change along all arguments of the gradient with respect to the params alone."""

    def of_params(at):
        *tensors, params = at
        return jax.grad(lambda params: loss((*tensors, params)))(params)

    return jax.jvp(of_params, (at,), (along,))[1]


def test_a_mixed_second_derivative_is_right():
    result, expected = (
        run(mixed, ONE_BLOCK, how, compiled=True) for how in ("chunked", "reference")
    )
    np.testing.assert_allclose(result["slopes"], expected["slopes"], rtol=1e-3, atol=1e-4)


@long
def test_the_gradient_of_params_alone_within_shard_map():
    loss, (*tensors, params), _ = problem(ONE_BLOCK, "chunked")
    mesh, spread = jax.sharding.Mesh(jax.devices()[:1], ("one",)), jax.P("one")

    def of_shard(tensors, params):
        return jax.lax.psum(loss((*tensors, params)), "one")

    sharded = jax.shard_map(of_shard, mesh=mesh, in_specs=(spread, jax.P()), out_specs=jax.P())
    result = jax.jit(jax.grad(sharded, 1))(tensors, params)
    expected = jax.grad(lambda params: loss((*tensors, params)))(params)
    np.testing.assert_allclose(result["slopes"], expected["slopes"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", some([forward, reverse_over_reverse], [forward], long))
def test_other_implementations_have_them(how):
    result, expected = (
        run(how, ONE_BLOCK, implementation, compiled=True)
        for implementation in ("xla", "reference")
    )
    for one, other in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
