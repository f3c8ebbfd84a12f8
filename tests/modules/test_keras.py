"""Layers of Keras 3 on its backends torch and jax, on the real library.

One process has one backend: ``KERAS_BACKEND``, and torch if that is not set.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest

import posenc
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

if find_spec("keras") is None:
    pytest.skip("Keras is not installed; .ci/libraries runs this", allow_module_level=True)
BACKEND = os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip(BACKEND)

import keras  # noqa: E402
from keras import ops  # noqa: E402

from posenc_keras import Attention, PositionEmbedding, layers  # noqa: E402
from posenc_keras.saved import from_json, to_json  # noqa: E402

# Keras' conversion of torch's tensors to NumPy 2.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)
HEADS, LENGTH, DIM, VOCABULARY = 4, 12, 32, 23
TOL = ATTENTION_TOL["float32"]
T5 = posenc.T5Bias(HEADS, num_buckets=8, causal=True, max_distance=16)
FOX = posenc.make("fox", num_heads=HEADS, hidden_dim=DIM)
SIZES = {"num_heads": 4, "head_dim": 8, "max_len": 16, "train_len": 16, "dim": 32, "hidden_dim": 32}


def heads(seed=0, length=LENGTH):
    """Queries, keys and values, with half as many heads of keys."""
    rng = np.random.default_rng(seed)
    shapes = [(2, length, n, DIM // HEADS) for n in (HEADS, 2, 2)]
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


def hidden(length=LENGTH):
    return np.random.default_rng(9).standard_normal((2, length, DIM)).astype("float32")


def as_numpy(x):
    return ops.convert_to_numpy(x)


def defined(q, k, v, layer, causal=True, **options):
    """The definition, in NumPy."""
    params = {name: as_numpy(each) for name, each in layer.params.items()}
    q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
    out = posenc.attention(q, k, v, layer.scheme, params, causal, **options)
    return np.swapaxes(out, 1, 2)


def model(scheme, embedding=None):
    """A functional language model of two layers, which share one ``Attention``, and positions."""
    tokens = keras.Input((None,), dtype="int32")
    positions = keras.Input((None,), dtype="int32")
    x, real = keras.layers.Embedding(VOCABULARY, DIM)(tokens), ops.not_equal(tokens, 0)
    if embedding is not None:
        x = PositionEmbedding(embedding)(x, positions=positions)
    attend = Attention(scheme, causal=True)
    for _ in range(2):
        q, k, v = (
            keras.layers.EinsumDense("abc,cde->abde", (None, HEADS, DIM // HEADS))(x)
            for _ in range(3)
        )
        out = attend(q, k, v, positions=positions, key_mask=real)
        x = x + keras.layers.EinsumDense("abde,dec->abc", (None, DIM))(out)
    return keras.Model([tokens, positions], keras.layers.Dense(VOCABULARY)(x))


def texts(rows=8):
    tokens = (np.arange(rows)[:, None] + np.arange(LENGTH + 1)) % (VOCABULARY - 1) + 1
    return tokens.astype("int32"), np.broadcast_to(np.arange(LENGTH, dtype="int32"), (rows, LENGTH))


@pytest.mark.parametrize(
    "scheme", [posenc.ALiBi(HEADS), posenc.RoPE(8), T5], ids=lambda s: type(s).__name__
)
def test_it_is_the_definition(scheme):
    q, k, v = heads()
    layer = Attention(scheme, causal=True, window=9)
    assert_near(as_numpy(layer(q, k, v)), defined(q, k, v, layer, window=9), TOL)
    pos = np.array([np.arange(LENGTH) * 3, np.arange(LENGTH)[::-1] + 5])
    got = layer(q, k, v, positions=pos, attention_mask=np.tri(LENGTH, k=2, dtype=bool)[None])
    mask = np.tri(LENGTH, k=2, dtype=bool)[None, None]
    want = defined(q, k, v, layer, window=9, tokens=posenc.Tokens(pos), mask=mask)
    assert_near(as_numpy(got), want, TOL)


def test_keys_elsewhere_and_keys_that_do_not_exist():
    q, k, v = heads()
    layer, own, exists = (
        Attention(posenc.ALiBi(HEADS)),
        np.array([[3, 20]] * 2),
        np.ones((2, 12), bool),
    )
    exists[1, :4] = False
    got = layer(q[:, :2], k, v, positions=own, key_positions=np.arange(12) * 2, key_mask=exists)
    keys, queries = posenc.Tokens(np.arange(12) * 2, exists=exists), posenc.Tokens(own)
    want = defined(q[:, :2], k, v, layer, False, tokens=keys, queries=queries)
    assert_near(as_numpy(got), want, TOL)
    with pytest.raises(ValueError, match=r"key_positions are given without positions"):
        layer(q, k, v, key_positions=np.arange(12))


def test_hidden_states_are_of_the_last_queries():
    """``x`` is of the keys' tokens: that of other queries is unknown, and was another token's."""
    q, k, v = heads()
    layer = Attention(posenc.make("inkling", num_heads=HEADS, hidden_dim=DIM), causal=True)
    x, at = np.ones((2, LENGTH, DIM), "float32"), np.arange(LENGTH)
    layer(q[:, 8:], k, v, x=x, positions=at[8:])
    with pytest.raises(ValueError, match="x: Inkling reads hidden states of the queries' tokens"):
        layer(q[:, :4], k, v, x=x, positions=at[:4])
    fox = Attention(FOX, causal=True)  # which reads those of keys
    fox(q[:, :4], k, v, x=x, positions=at[:4])


def test_a_model_trains_and_its_file_brings_the_table_back(tmp_path):
    keras.utils.set_random_seed(0)
    tokens, positions = texts()
    made = model(T5, posenc.Learned(LENGTH, DIM))
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    made.optimizer.learning_rate = 0.02
    of_positions = [w for w in made.trainable_weights if w.name == "table"]
    before = [as_numpy(w) for w in of_positions]
    data = ([tokens[:, :-1], positions], tokens[:, 1:])
    losses = made.fit(*data, batch_size=8, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    assert len(before) == 2
    assert all(np.any(as_numpy(w) != b) for w, b in zip(of_positions, before, strict=True))
    made.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded.predict(data[0], verbose=0), made.predict(data[0], verbose=0))


@pytest.mark.parametrize("scheme", [posenc.RoPE(8), T5, FOX], ids=lambda s: type(s).__name__)
def test_it_decodes_with_a_cache(scheme):
    """The second row is three tokens behind, as after a shorter prompt."""
    q, k, v = heads()
    x = hidden() if scheme is FOX else None
    layer = Attention(scheme, causal=True)
    whole = as_numpy(layer(q, k, v, x=x))
    parts = [k, v] if x is None else [k, v, x]
    cache = tuple(np.zeros((2, LENGTH + 4, *p.shape[2:]), "float32") for p in parts)
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        at = np.arange(start, stop)[None] + np.array([[3], [0]]) * (start > 0)
        if start == 0:
            at = np.stack([np.arange(8), np.arange(8)])
        rows = np.arange(2)[:, None]
        new = [None if p is None else p[rows, at] for p in (q, k, v, x)]
        out, cache = layer(*new[:3], x=new[3], positions=at, cache=cache)
        real = at < LENGTH
        assert_near(as_numpy(out)[real], whole[rows, at][real], 4 * TOL)


def test_what_a_cache_needs_is_said():
    q, k, v = heads()
    layer, cache = Attention(posenc.RoPE(8), causal=True), (np.zeros((2, 8, 2, 8), "float32"),) * 2
    at = np.array([[7, 8]] * 2)
    for options, said in (
        ({}, r"cache needs positions \(B, Q\)"),
        ({"positions": at}, r"positions must be 0 .. 7, the slots of the cache, got 7 .. 8"),
        (
            {"positions": at - 1, "x": hidden(2)},
            r"cache must have 3 arrays: .* x; got 2",
        ),
        ({"positions": at - 1, "key_positions": at}, "key_positions are those of the cache"),
        ({"positions": at[:1] - 1}, r"\(B, Q\) = \(2, 2\), .* got shape \(1, 2\)"),
        (
            {"positions": at - 1, "key_mask": np.ones((2, 8), bool)},
            r"key_mask .* is of the new tokens, \(B, Q\) = \(2, 2\), got shape \(2, 8\)",
        ),
        ({"positions": at - 1, "key_mask": at > 7}, "key_mask hides keys that are not after all"),
        ({"positions": at * 0}, r"positions must differ.*got \[0 0\]"),
        # Both would be written to one slot.
        ({"positions": at * 0, "key_mask": at < 8}, "key_mask hides keys that are not after all"),
    ):
        with pytest.raises(ValueError, match=said):
            layer(q[:, :2], k[:, :2], v[:, :2], cache=cache, **options)
    wrong = np.zeros((2, 8, 3, 8), "float32")
    with pytest.raises(ValueError, match=r"cache\[1\], which holds values, must be \(2, 8, 2, 8\)"):
        layer(q[:, :2], k[:, :2], v[:, :2], positions=at - 1, cache=(cache[0], wrong))
    with pytest.raises(ValueError, match=r"causal=True"):
        Attention(posenc.RoPE(8))(q[:, :2], k[:, :2], v[:, :2], positions=at - 1, cache=cache)
    with pytest.raises(TypeError, match=r"attention_mask must be boolean or integer, got"):
        layer(q, k, v, attention_mask=np.zeros((2, 12, 12), "float32"))


def test_padding_after_the_tokens_of_a_row_takes_no_slot_for_good():
    """As a mask that ``key`` carries says it, of a layer that passes masks on."""

    class Split(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x):
            return ops.reshape(x, (-1, x.shape[1], HEADS, DIM // HEADS))

    tokens, at = keras.Input((3,), dtype="int32"), keras.Input((3,), dtype="int32")
    x = Split()(keras.layers.Embedding(VOCABULARY, DIM, mask_zero=True)(tokens))
    slots = [keras.Input((8, HEADS, DIM // HEADS)) for _ in "kv"]
    out = Attention(posenc.ALiBi(HEADS), causal=True)(x, x, x, positions=at, cache=tuple(slots))
    step = keras.Model([tokens, at, *slots], out)
    empty = [np.zeros((1, 8, HEADS, DIM // HEADS), "float32")] * 2

    def run(rows):
        cache = empty
        for ids, pos in rows:
            new = [ops.convert_to_tensor(np.array([each], "int32")) for each in (ids, pos)]
            found, cache = step([*new, *map(ops.convert_to_tensor, cache)])
        return as_numpy(found)

    padded = run([([3, 5, 0], [0, 1, 2]), ([7, 8, 9], [2, 3, 4])])
    whole = run([([3, 5, 7], [0, 1, 2]), ([7, 8, 9], [2, 3, 4])])
    np.testing.assert_array_equal(padded, whole)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"implementation": "nope"}, ValueError, "unknown implementation 'nope'"),
        ({"window": -3}, ValueError, "window must be at least 1, got -3"),
        ({"scale": "a"}, TypeError, "scale must be a number, got 'a'"),
        ({"softcap": 0.0}, ValueError, "softcap must be .*got 0.0"),
        ({"seed": -1}, ValueError, "seed must be an integer of at least 0, or several"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_wrong_options_are_said_when_a_layer_is_made(options, error, said):
    with pytest.raises(error, match=said):
        Attention(T5, causal=True, **options)


def test_lists_are_arrays_and_shapes_are_checked_before_anything_runs():
    q, k, v = heads()
    layer, at = Attention(posenc.RoPE(8), causal=True), list(range(LENGTH))
    assert_near(as_numpy(layer(q, k, v, positions=at)), as_numpy(layer(q, k, v)), TOL)
    real = (np.arange(LENGTH) < 7)[None].repeat(2, 0)
    listed = layer(q, k, v, key_mask=real.tolist())
    np.testing.assert_array_equal(as_numpy(listed), as_numpy(layer(q, k, v, key_mask=real)))
    with pytest.raises(TypeError, match="attention_mask must be an array, got Mask"):
        layer(q, k, v, attention_mask=posenc.causal)
    wide, flat = keras.Input((LENGTH, HEADS, 8)), keras.Input((LENGTH, DIM))
    with pytest.raises(ValueError, match=r"value must be \(B, L, H, D\), got shape \(None, 12, 32"):
        layer(wide, wide, flat)
    assert layer.compute_output_shape(q.shape, k.shape, v.shape) == q.shape
    embedding = PositionEmbedding(posenc.Sinusoidal(DIM))
    assert embedding.compute_output_shape((2, LENGTH, DIM)) == (2, LENGTH, DIM)


def test_learned_arrays_stay_float32_under_a_policy_of_half_precision():
    layer = Attention(T5, causal=True, dtype="mixed_bfloat16")
    out = layer(*heads())
    assert keras.backend.standardize_dtype(out.dtype) == "bfloat16"
    (table,) = layer.params.values()
    assert keras.backend.standardize_dtype(table.dtype) == "float32"


def test_padding_is_not_seen():
    made = model(posenc.ALiBi(HEADS))
    tokens, positions = texts(2)
    padded = np.where(np.arange(LENGTH) < 3, 0, tokens[:, :-1])
    whole = made.predict([padded, positions], verbose=0)
    short = made.predict([padded[:, 3:], positions[:, :-3]], verbose=0)
    assert_near(whole[:, 3:], short, 4 * TOL)


def test_every_scheme_of_the_catalogue_is_saved():
    for name in posenc.catalogue():
        sizes = {**SIZES, "max_len": None} if name == "nope" else SIZES
        scheme = posenc.make(name, **sizes)
        assert from_json(to_json(scheme)) == scheme


def test_a_scheme_of_ones_own_must_be_imported():
    saved = {"class": "some_module.of_mine:Mine", "fields": {}}
    with pytest.raises(ValueError, match=r"scheme Mine of some_module.of_mine, which is not imp"):
        from_json(saved)
    with pytest.raises(ValueError, match=r"which is not imported"):
        from_json({"class": "subprocess:Popen", "fields": {}})


def test_embeddings_are_of_a_layer_of_their_own():
    with pytest.raises(ValueError, match=r"adds an embedding, which is of posenc_keras.PositionE"):
        Attention(posenc.Sinusoidal(DIM))
    with pytest.raises(ValueError, match=r"must act on embeddings alone, got ALiBi"):
        PositionEmbedding(posenc.ALiBi(HEADS))
    x = np.zeros((2, 3, DIM), "float32")
    layer = PositionEmbedding(posenc.Sinusoidal(DIM))
    want = posenc.embedding(posenc.Sinusoidal(DIM), np.array([4, 5, 6]))
    assert_near(as_numpy(layer(x, positions=np.array([4, 5, 6])))[0], want, TOL)
    assert_near(
        as_numpy(layer(x))[0, 1], posenc.embedding(posenc.Sinusoidal(DIM), np.array([1]))[0], TOL
    )


def test_another_backend_of_keras_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    layers._modules.cache_clear()
    with pytest.raises(RuntimeError, match="backends jax and torch, got 'tensorflow': set KERAS_B"):
        Attention(posenc.ALiBi(2))
