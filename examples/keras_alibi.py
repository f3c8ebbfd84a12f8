"""A language model of Keras 3 with ALiBi: ``fit``, a ``.keras`` file, decoding with a cache.

``KERAS_BACKEND=torch python keras_alibi.py``, or jax. The file of one loads on the other.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from keras import layers, ops

import posenc
from posenc_keras import Attention

HEADS, DIM, VOCABULARY, LENGTH = 4, 64, 16, 24


def build(slots=None):
    """Logits of tokens; with slots, also of positions and a cache, and the cache that follows."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, DIM, name="embed")(tokens)
    heads = [layers.Dense(DIM, name=name)(x) for name in ("query", "key", "value")]
    q, k, v = (layers.Reshape((-1, HEADS, DIM // HEADS))(each) for each in heads)
    attend = Attention(posenc.ALiBi(HEADS), causal=True, name="attend")
    inputs, more = tokens, []
    if slots is None:
        out = attend(q, k, v)
    else:
        positions = keras.Input((None,), dtype="int32", name="positions")
        cache = [keras.Input((slots, HEADS, DIM // HEADS), name=f"cache_{n}") for n in "kv"]
        out, more = attend(q, k, v, positions=positions, cache=tuple(cache))
        inputs = [tokens, positions, *cache]
    x = x + layers.Dense(DIM, name="out")(layers.Reshape((-1, DIM))(out))
    logits = layers.Dense(VOCABULARY, name="logits")(x)
    return keras.Model(inputs, logits if slots is None else [logits, *more])


def main():
    keras.utils.set_random_seed(0)
    texts = (np.arange(256)[:, None] + 3 * np.arange(LENGTH + 1)) % VOCABULARY  # counts by 3
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    losses = model.fit(texts[:, :-1], texts[:, 1:], batch_size=32, epochs=3, verbose=0)
    print(f"{keras.backend.backend()}: loss {losses.history['loss'][-1]:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        loaded = keras.saving.load_model(Path(folder) / "model.keras")

    slots = 2 * LENGTH  # ALiBi reads further than it was trained
    decoder = build(slots)
    for layer in filter(lambda layer: layer.weights, loaded.layers):
        decoder.get_layer(layer.name).set_weights(layer.get_weights())
    cache = [ops.zeros((1, slots, HEADS, DIM // HEADS))] * 2
    text = [5]
    for at in range(slots - 1):
        token, position = (ops.convert_to_tensor([[n]], "int32") for n in (text[-1], at))
        logits, *cache = decoder([token, position, *cache])
        text.append(int(ops.argmax(logits[0, -1])))
    whole = np.argmax(ops.convert_to_numpy(loaded(np.array([text[:-1]], "int32"))), -1)
    print("by 3 beyond the training length:", text[-4:])
    print("equal without a cache:", whole[0].tolist() == text[1:])


if __name__ == "__main__":
    main()
