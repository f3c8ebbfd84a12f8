"""The schemes of a model as a pytree, and labels of its params."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from frameworks import HAS
from sample import long, some
from subjects import MAX_LEN, SUBJECTS, heads, normal, steers_attention

import posenc
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM

if not HAS["jax"]:
    pytest.skip("jax is not installed", allow_module_level=True)

import jax
import jax.numpy as jnp

import posenc_jax
from posenc_jax import Positions

LAYERS = 3
FLOAT32 = 3e-6  # as in the tests of the torch module

KEY = jax.random.key(0)
each_subject = pytest.mark.parametrize("subject", SUBJECTS)


def width(scheme):
    term = posenc.embedding(scheme, np.asarray([0]), posenc.init_params(scheme))
    return None if term is None else term.shape[-1]


def hidden(scheme, length=6):
    size = width(scheme) or heads(scheme) * HEAD_DIM
    return jnp.asarray(normal((2, length, size), 0), jnp.float32)


def self_attention(attend, x, **keywords):
    """Self-attention of hidden states (B, L, heads * HEAD_DIM)."""
    h = x.reshape(*x.shape[:2], -1, HEAD_DIM)
    tokens = posenc.Tokens(x=x[..., :HIDDEN_DIM])
    return attend(h, h, h, tokens=tokens, causal=True, **keywords).reshape(x.shape)


@jax.jit
def stack(positions, x):
    """Residual layers that have attention only."""
    x = positions.embed(x)
    for position in positions:
        x = x + self_attention(position.attend, x)
    return x


@partial(jax.jit, static_argnums=(0, 2))
def by_hand(schemes, params, sources, x):
    """The same from arrays by layer, without a container."""
    for layer in sorted(set(sources)):
        term = posenc.embedding(
            schemes[layer], jnp.arange(x.shape[1]), params.get(str(sources[layer]))
        )
        x = x if term is None else x + term
    for layer, scheme in enumerate(schemes):
        layer_params = params.get(str(sources[layer]))
        x = x + self_attention(
            lambda *qkv, s=scheme, p=layer_params, **k: posenc_jax.attention(*qkv, s, p, **k), x
        )
    return x


def sharing(scheme):
    once = scheme.shared or width(scheme) is not None
    return (0,) * LAYERS if once else tuple(range(LAYERS))


@each_subject
def test_each_learned_array_is_a_leaf_once(subject):
    scheme = SUBJECTS[subject]
    positions = Positions.init(scheme, LAYERS, KEY)
    specs = scheme.param_specs()
    firsts = sorted(set(sharing(scheme))) if specs else []
    assert {layer: set(arrays) for layer, arrays in positions.params.items()} == {
        str(layer): set(specs) for layer in firsts
    }
    for layer in firsts:  # drawn as init draws, from the layer's own key
        alone = posenc_jax.init(scheme, jax.random.fold_in(KEY, layer))
        jax.tree.map(np.testing.assert_array_equal, dict(positions[layer].params), alone)
    leaves, tree = jax.tree.flatten(positions)
    assert len(leaves) == len(firsts) * len(specs)
    again = jax.tree.unflatten(tree, leaves)
    assert again.plan == positions.plan
    assert hash(again.plan) == hash(positions.plan)
    assert len(again) == len(list(again)) == LAYERS
    shapes = jax.eval_shape(lambda key: Positions.init(scheme, LAYERS, key), KEY)
    assert jax.tree.structure(shapes) == tree


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
@each_subject
def test_arrays_are_named_as_in_torch(subject):
    import posenc_torch

    mix = [SUBJECTS[subject], posenc.T5Bias(HEADS)]
    params = Positions.init(mix, LAYERS, KEY).params
    state = posenc_torch.Positions(mix, LAYERS).state_dict()
    assert {f"{layer}.{name}" for layer in params for name in params[layer]} == state.keys()


@pytest.mark.parametrize(
    "subject",
    some(["alibi-learned", "learned", "rope", "sinusoidal", "t5"], ["learned", "t5"], long),
)
def test_a_model_is_its_layers_by_hand(subject):
    scheme = SUBJECTS[subject]
    positions, x = Positions.init(scheme, LAYERS, KEY), hidden(scheme)
    expected = by_hand((scheme,) * LAYERS, positions.params, sharing(scheme), x)
    assert_near(stack(positions, x), expected, FLOAT32)


def test_a_plan_by_layer():
    schemes = (posenc.T5Bias(HEADS), posenc.RoPE(HEAD_DIM), posenc.T5Bias(HEADS))
    positions, x = Positions.init(list(schemes[:2]), LAYERS, KEY), hidden(schemes[0])
    assert positions.params.keys() == {"0"}
    assert [position.scheme for position in positions] == list(schemes)
    assert_near(stack(positions, x), by_hand(schemes, positions.params, (0, 1, 0), x), FLOAT32)
    with pytest.raises(IndexError, match=r"layer must be 0 \.\. 2, got 3"):
        positions[3]


def test_a_plan_is_taken_as_it_is():
    plan = posenc.layers.LayerPlan.of([posenc.T5Bias(HEADS), posenc.NoPE()], 3, [3, None])
    positions = Positions.init(plan, key=KEY)
    assert positions.plan is plan
    assert positions.params.keys() == {"0"}
    with pytest.raises(ValueError, match="layers must be 3"):
        Positions.init(plan, 4, KEY)
    with pytest.raises(TypeError, match="key is missing"):
        Positions.init(plan)


def test_wrong_first_calls_say_what_is_right():
    with pytest.raises(TypeError, match=r"key must be a JAX key, got 0; give a jax\.random\.key"):
        Positions.init(posenc.NoPE(), 2, key=0)
    with pytest.raises(TypeError, match=r"key must be a JAX key, got 0; give a jax\.random\.key"):
        posenc_jax.init(posenc.T5Bias(HEADS), 0)
    with pytest.raises(TypeError, match="scheme must be an instance of a PositionScheme"):
        Positions.init("alibi", key=KEY)
    positions = Positions.init(posenc.NoPE(), 2, KEY)
    with pytest.raises(AttributeError, match=r"positions\[layer\]\.attend\(q, k, v\)"):
        _ = positions.attend


@pytest.mark.parametrize("subject", some(["learned", "rope", "t5"], ["t5"], long))
def test_each_layer_has_its_window(subject):
    scheme, windows = SUBJECTS[subject], [3, None, 1]
    positions, x = Positions.init(scheme, LAYERS, KEY, windows), hidden(SUBJECTS[subject])
    plain = Positions.init(scheme, LAYERS, KEY)
    same = jax.tree.map(jnp.array_equal, dict(positions.params), dict(plain.params))
    assert all(jax.tree.leaves(same))
    assert [position.window for position in positions] == windows
    assert jax.tree.structure(positions) != jax.tree.structure(plain)  # windows are static

    @jax.jit
    def by_calls(plain, x):
        x = plain.embed(x)
        for position, window in zip(plain, windows, strict=True):
            x = x + self_attention(position.attend, x, window=window)
        return x

    assert_near(stack(positions, x), by_calls(plain, x), FLOAT32)
    assert np.abs(stack(positions, x) - stack(plain, x)).max() > 1e-3

    @jax.jit
    def unwindowed(positions, x):
        x = positions.embed(x)
        for position in positions:
            x = x + self_attention(position.attend, x, window=None)
        return x

    assert_near(unwindowed(positions, x), stack(plain, x), FLOAT32)


@pytest.mark.parametrize("subject", some(["alibi-learned", "fox", "learned", "t5"], ["fox"], long))
def test_an_array_learns_from_every_layer_it_serves(subject):
    scheme = SUBJECTS[subject]
    positions = Positions.init(scheme, LAYERS, KEY)
    x = jnp.asarray(normal((2, 6, heads(scheme) * HEAD_DIM), 1), jnp.float32)

    @jax.jit
    def gradient(layers, weights):
        def total(positions):
            outs = [self_attention(position.attend, x) for position in positions]
            return sum(w * jnp.sum(out**2) for w, out in zip(weights, outs, strict=True))

        return jax.grad(total)(layers)

    separate = [gradient(positions, one) for one in jnp.eye(LAYERS)]
    together = gradient(positions, jnp.ones(LAYERS))
    assert jax.tree.structure(together) == jax.tree.structure(positions)
    total = jax.tree.map(lambda *parts: sum(parts), *separate)
    jax.tree.map(lambda one, other: assert_near(one, other, FLOAT32), together, total)
    nonzero = [sum(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(one)) for one in separate]
    assert nonzero == [len(scheme.param_specs()) if steers_attention(scheme) else 0] * LAYERS


@pytest.mark.parametrize(
    "scheme",
    some([posenc.Sinusoidal(8), posenc.Learned(MAX_LEN, 8)], [posenc.Learned(MAX_LEN, 8)], long),
    ids=str,
)
def test_embedding_is_added_once_and_rounded_once(scheme):
    positions = Positions.init(scheme, LAYERS, KEY)
    x, pos = hidden(scheme, 5), jnp.asarray([[0, 1, 2, 3, 4], [7, 0, 7, 1, MAX_LEN - 1]])
    term = posenc.embedding(scheme, pos, positions[0].params)
    assert jnp.array_equal(positions.embed(x, pos), x + term)
    assert jnp.array_equal(positions.embed(x), x + term[:1])
    half = x.astype(jnp.bfloat16)
    assert jnp.array_equal(
        positions.embed(half, pos), (half.astype(jnp.float32) + term).astype(jnp.bfloat16)
    )
    for wrong in (x[..., :1], x[:, :1], jnp.ones((2, 5, 8), int)):
        with pytest.raises(ValueError, match="x must be floating and end in"):
            positions.embed(wrong, pos)


def model(scheme):
    return {
        "tokens": jnp.ones((16, 32)),
        "position": Positions.init(scheme, LAYERS, KEY),
        "blocks": [{"qkv": jnp.ones((32, 96)), "gain": jnp.ones(32)}],
    }


@each_subject
def test_labels_of_params(subject):
    params = model(SUBJECTS[subject])
    labels = posenc_jax.param_labels(params)
    assert jax.tree.structure(labels) == jax.tree.structure(params)
    assert labels["tokens"] == labels["blocks"][0]["qkv"] == "decay"
    assert labels["blocks"][0]["gain"] == "no_decay"
    assert set(jax.tree.leaves(labels["position"])) <= {"position"}
    # Plain dicts are labelled by their key.
    params["position"] = posenc_jax.init(SUBJECTS[subject], KEY)
    by_name = posenc_jax.param_labels(params, ("position",))
    assert by_name == labels | {"position": dict.fromkeys(params["position"], "position")}


def test_labels_where_nothing_is_a_position():
    params = model(posenc.NoPE())
    posenc_jax.param_labels(params)  # a scheme without learned arrays counts as a position
    posenc_jax.param_labels(params["position"])
    del params["position"]
    with pytest.raises(ValueError, match=r"no posenc_jax.Position .* names=\['position'\]"):
        posenc_jax.param_labels(params, "position")
