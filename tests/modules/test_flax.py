"""Schemes in modules of Flax, NNX and Linen, on the real library."""

from functools import partial

import numpy as np
import pytest

import posenc
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed; .ci/newest-jax runs this")
jax = pytest.importorskip("jax")
jnp = jax.numpy
linen = pytest.importorskip("flax.linen")
optax = pytest.importorskip("optax")

import posenc_jax  # noqa: E402
from posenc_jax.flax import Positions, attention_fn  # noqa: E402

HEADS, LENGTH, DIM = 4, 12, 32
TOL = ATTENTION_TOL["float32"]
T5 = posenc.T5Bias(HEADS, num_buckets=8, causal=True, max_distance=16)
SCHEMES = {
    "t5": T5,
    "learned": posenc.Learned(LENGTH, DIM),
    "sinusoidal": posenc.Sinusoidal(DIM),
    "alibi": posenc.ALiBi(HEADS),
    "two": [posenc.RoPE(DIM // HEADS), T5],
}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.LinearGeneral(DIM, (3, HEADS, DIM // HEADS), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, DIM // HEADS), DIM, axis=(-2, -1), rngs=rngs)

    def __call__(self, x, attend):
        qkv = self.qkv(x)
        return x + self.out(attend(*(qkv[:, :, n] for n in range(3))))


class Model(nnx.Module):
    def __init__(self, scheme, rngs):
        self.positions = Positions(scheme, 2, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x, **where):
        bound = self.positions.bind(causal=True, **where)
        x = bound.embed(x)
        for block, attend in zip(self.blocks, bound, strict=True):
            x = block(x, attend)
        return x


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, LENGTH, DIM)), jnp.float32)


def arrays(module):
    return [np.asarray(a) for a in jax.tree.leaves(nnx.to_pure_dict(nnx.state(module)))]


@pytest.mark.parametrize("name", SCHEMES)
def test_learned_arrays_are_params_that_an_optimizer_moves(name, x):
    model = Model(SCHEMES[name], nnx.Rngs(0))
    before = arrays(model.positions)
    expected = jax.tree.leaves(model.positions.pure.params)
    assert [a.shape for a in before] == [a.shape for a in expected]

    @nnx.jit
    def step(model, optimizer):
        gradients = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)

    step(model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param))
    after = arrays(model.positions)
    assert len(after) == len(before)
    assert all(np.any(one != other) for one, other in zip(before, after, strict=True))


def test_its_own_rate_by_labels(x):
    state = nnx.state(Model(T5, nnx.Rngs(0)), nnx.Param)
    labels = nnx.to_pure_dict(posenc_jax.param_labels(state, names="positions"))
    assert set(jax.tree.leaves(labels.pop("positions"))) == {"position"}
    assert set(jax.tree.leaves(labels)) == {"decay", "no_decay"}


@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_posenc_jax_positions(name, x):
    positions = Positions(SCHEMES[name], 2, rngs=nnx.Rngs(3))
    key = nnx.Rngs(3).params()
    pure = posenc_jax.Positions.init(SCHEMES[name], 2, key)
    q = x.reshape(2, LENGTH, HEADS, -1)
    assert len(positions) == len(pure) == 2
    assert np.array_equal(positions.embed(x), pure.embed(x))
    for one, other in zip(positions, pure, strict=True):
        assert one.scheme == other.scheme
        assert np.array_equal(one.attend(q, q, q, True), other.attend(q, q, q, True))


def test_it_is_saved_and_loaded(x):
    model, other = Model(T5, nnx.Rngs(0)), Model(T5, nnx.Rngs(1))
    saved = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(other, state)
    assert np.array_equal(model(x), other(x))


@pytest.mark.parametrize("name", ["t5", "two", "alibi"])
def test_it_decodes_with_a_cache(name, x):
    """Queries of the last token alone see what they see in the whole sequence."""
    positions = Positions(SCHEMES[name], 2, rngs=nnx.Rngs(0))
    q = x.reshape(2, LENGTH, HEADS, -1)
    cache = jnp.pad(q, ((0, 0), (0, 4), (0, 0), (0, 0)), constant_values=7.0)
    slots = posenc.Tokens(pos=jnp.arange(LENGTH + 4))
    last = posenc.Tokens(pos=jnp.array([LENGTH - 1]))
    passes = positions.bind(causal=True), positions.bind(slots, last, causal=True)
    for whole, one in zip(*passes, strict=True):
        assert_near(one(q[:, -1:], cache, cache), whole(q, q, q)[:, -1:], TOL)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize(
    "scheme", [posenc.ALiBi(HEADS), posenc.RoPE(DIM // HEADS)], ids=["alibi", "rope"]
)
def test_attention_fn_in_flax_own_attention(kind, scheme, x):
    own = {
        "num_heads": HEADS,
        "qkv_features": DIM,
        "attention_fn": attention_fn(scheme, causal=True),
    }
    seen = {}

    def spy(attend):
        def call(query, key, value, mask=None, **options):
            seen["qkv"] = query, key, value
            return attend(query, key, value, mask=mask, **options)

        return call

    own["attention_fn"] = spy(own["attention_fn"])
    if kind == "nnx":
        module = nnx.MultiHeadAttention(in_features=DIM, decode=False, rngs=nnx.Rngs(0), **own)
        out = module(x)
        expected = module.out(posenc_jax.attention(*seen["qkv"], scheme, causal=True))
    else:
        module = linen.MultiHeadDotProductAttention(**own)
        params = module.init(jax.random.key(0), x)
        out = module.apply(params, x)
        attended = posenc_jax.attention(*seen["qkv"], scheme, causal=True)
        weights = params["params"]["out"]
        expected = jnp.einsum("blhd,hdc->blc", attended, weights["kernel"]) + weights["bias"]
    assert_near(out, expected, TOL)


def test_attention_fn_decodes_in_flax_own_attention(x):
    """The cache of NNX is longer than what was decoded, and only its mask says so."""
    scheme = posenc.RoPE(DIM // HEADS)
    module = nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=DIM, rngs=nnx.Rngs(0), attention_fn=attention_fn(scheme)
    )
    whole = module(x, is_causal=True, decode=False)
    module.init_cache((2, LENGTH + 4, DIM))
    for at in range(LENGTH):
        where = jnp.full((2, 1), at)
        out = module(x[:, at : at + 1], decode=True, input_positions=where)
        assert_near(out, whole[:, at : at + 1], 4 * TOL)  # projections of other shapes round too
    with pytest.raises(ValueError, match="give input_positions"):
        module(x[:, :1], decode=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_rate": 0.1}, NotImplementedError, "dropout_rate=0.1"),
        ({"precision": "highest"}, NotImplementedError, "precision=highest"),
        ({"module": object()}, NotImplementedError, "to sow weights"),
    ],
)
def test_what_attention_fn_has_not(options, error, message, x):
    q = x.reshape(2, LENGTH, HEADS, -1)
    with pytest.raises(error, match=message):
        attention_fn(posenc.ALiBi(HEADS))(q, q, q, **options)


def test_attention_fn_of_a_learned_scheme_is_refused():
    with pytest.raises(ValueError, match="T5Bias learns table, and what a function holds never"):
        attention_fn(T5)


def test_attention_fn_takes_masks_biases_and_batches(x):
    q = jnp.stack([x, x + 1]).reshape(2, 2, LENGTH, HEADS, -1)
    rng = np.random.default_rng(1)
    mask = jnp.asarray(rng.random((2, 2, 1, LENGTH, LENGTH)) < 0.7) | jnp.eye(LENGTH, dtype=bool)
    bias = jnp.asarray(rng.standard_normal((1, 1, HEADS, LENGTH, LENGTH)), jnp.float32)
    alibi = posenc.ALiBi(HEADS)
    out = attention_fn(alibi)(q, q, q, bias=bias, mask=mask)
    for one in range(2):
        options = {"mask": jnp.broadcast_to(mask[one], (2, HEADS, LENGTH, LENGTH)), "bias": bias[0]}
        expected = posenc_jax.attention(q[one], q[one], q[one], alibi, **options)
        assert_near(out[one], expected, TOL)
    half = attention_fn(alibi)(q, q, q, dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    compiled = jax.jit(partial(attention_fn(alibi), is_causal=True))(q, q, q)
    assert_near(compiled[0], posenc_jax.attention(q[0], q[0], q[0], alibi, causal=True), TOL)
