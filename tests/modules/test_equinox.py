"""Schemes in modules of Equinox, on the real library."""

import numpy as np
import pytest

import posenc
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

eqx = pytest.importorskip("equinox", reason="Equinox is not installed; .ci/newest-jax runs this")
jax = pytest.importorskip("jax")
jnp = jax.numpy
optax = pytest.importorskip("optax")

import posenc_jax  # noqa: E402
from posenc_jax.equinox import Positions, process_heads  # noqa: E402

HEADS, LENGTH, DIM = 4, 12, 32
TOL = ATTENTION_TOL["float32"]
T5 = posenc.T5Bias(HEADS, num_buckets=8, causal=True, max_distance=16)


class Model(eqx.Module):
    positions: Positions
    qkv: eqx.nn.Linear

    def __init__(self, scheme, key):
        one, other = jax.random.split(key)
        self.positions = Positions(scheme, 2, key=one)
        self.qkv = eqx.nn.Linear(DIM, 3 * DIM, key=other)

    def __call__(self, x):
        bound = self.positions.bind(causal=True)
        x = bound.embed(x)
        for attend in bound:
            qkv = jax.vmap(jax.vmap(self.qkv))(x).reshape(*x.shape[:2], 3, HEADS, -1)
            x = x + attend(*(qkv[:, :, n] for n in range(3))).reshape(x.shape)
        return x


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, LENGTH, DIM)), jnp.float32)


@pytest.mark.parametrize(
    "scheme", [T5, posenc.Learned(LENGTH, DIM), [posenc.RoPE(8), T5]], ids=["t5", "learned", "two"]
)
def test_an_optimizer_moves_learned_arrays(scheme, x):
    model = Model(scheme, jax.random.key(0))

    @eqx.filter_jit
    def step(model):
        gradients = eqx.filter_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(jnp.negative, gradients))

    before, after = (jax.tree.leaves(m.positions) for m in (model, step(model)))
    assert before
    assert all(np.any(one != other) for one, other in zip(before, after, strict=True))
    labels = posenc_jax.param_labels(eqx.filter(model, eqx.is_array))
    assert set(jax.tree.leaves(labels.positions)) == {"position"}
    assert set(jax.tree.leaves(labels.qkv)) == {"decay", "no_decay"}


def test_it_is_posenc_jax_positions(x):
    one, other = (
        kind(T5, 2, key=jax.random.key(3)) for kind in (Positions, posenc_jax.Positions.init)
    )
    q = x.reshape(2, LENGTH, HEADS, -1)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a.attend(q, q, q, True), b.attend(q, q, q, True))


def test_it_is_saved_and_loaded(x, tmp_path):
    model, other = (Model(T5, jax.random.key(seed)) for seed in (0, 1))
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", other)
    assert np.array_equal(loaded(x), model(x))


class Scaled(posenc.RoPE):
    """RoPE with a scale of its own, which the module does not know."""

    def scale(self, head_dim):
        return 0.3


@pytest.mark.parametrize("kind", [posenc.RoPE, Scaled])
def test_process_heads_turns_queries_and_keys(x, kind):
    rope = kind(DIM // HEADS)
    module = eqx.nn.MultiheadAttention(HEADS, DIM, key=jax.random.key(0))
    seen = {}

    def spy(query, key, value):
        seen["qkv"] = query, key, value
        return process_heads(rope)(query, key, value)

    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    out = module(x[0], x[0], x[0], mask=mask, process_heads=spy)
    q, k, v = (a[None] for a in seen["qkv"])
    attended = posenc_jax.attention(q, k, v, rope, causal=True)[0].reshape(LENGTH, DIM)
    assert_near(out, jax.vmap(module.output_proj)(attended), TOL)
    moved = process_heads(rope, jnp.arange(LENGTH) + 5)(q[0], k[0], v[0])
    assert np.any(moved[0] != process_heads(rope)(q[0], k[0], v[0])[0])


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (posenc.ALiBi(HEADS), r"ALiBi does more than turn queries and keys \(bias, key_bias\)"),
        (posenc.make("rerope", head_dim=8, train_len=16), r"ReRoPE does more .*\(regions\)"),
        (posenc.schemes.Sink(posenc.RoPE(8), learned=False), r"Sink does more .*\(sink\)"),
        (posenc.Sinusoidal(32), r"Sinusoidal does more .*\(embedding\)"),
        (posenc.make("learned_rope", num_heads=4, head_dim=8, train_len=16), "learns log_scale"),
    ],
)  # fmt: skip
def test_what_process_heads_cannot_do_is_refused(scheme, message):
    with pytest.raises(ValueError, match=message):
        process_heads(scheme)
