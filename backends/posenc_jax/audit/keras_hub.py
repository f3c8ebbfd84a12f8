"""KerasHub: its rotation, biases and tables, on whichever backend Keras runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from posenc.audit import Candidate, CannotExpressError, Sizes, adapters
from posenc.audit.adapters import bias_of_keys, causal_alibi, params_of, row_of, square_of

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from keras import ops
from keras_hub.layers import AlibiBias, PositionEmbedding, RotaryEmbedding, SinePositionEncoding
from keras_hub.src.models.t5.t5_multi_head_attention import T5MultiHeadAttention

_HALF = ("float32", "bfloat16", "float16")
_LEARNED = "learned:max_len=512"
_FACTOR = {"scaling_factor": 4.0}
_ROPE: dict[str, dict[str, Any]] = {
    "rope": {},
    "rope:base=500000": {"max_wavelength": 500_000},
    "rope_pi:factor=4": _FACTOR,
    "rope_yarn:factor=4,train_len=4096": {**_FACTOR, "rope_type": "yarn"},
    "rope_dynamic:factor=4,train_len=4096": {**_FACTOR, "rope_type": "dynamic"},
    "rope_ntk:factor=4": {**_FACTOR, "rope_type": "dynamic"},
}


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate."""
    backend = keras.backend.backend()
    if backend not in ("jax", "torch"):
        raise RuntimeError(f"Keras runs on {backend}; set KERAS_BACKEND to jax or torch")
    make = partial(adapters.candidate, "keras-hub", framework=backend)
    for label, options in _ROPE.items():
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        yield make(
            f"RotaryEmbedding({said})(x, positions=pos)", label, "rotation",
            partial(_rotation, options, False), dtypes=_HALF,
        )  # fmt: skip
        if label == "rope":
            yield make(
                "RotaryEmbedding()(x, start_index=n)", label, "rotation",
                partial(_rotation, options, True), path="cached", dtypes=_HALF,
            )  # fmt: skip
    yield make("RotaryEmbedding()", "rope:layout=interleaved", "rotation", _no_layout)
    yield make("RotaryEmbedding()", "rope:rotary_dim=32", "rotation", _no_part)
    for bias, scheme in ((8, causal_alibi), (4, partial(causal_alibi, max_bias=4.0))):
        label = "alibi" if bias == 8 else f"alibi:max_bias={bias}"
        yield make(
            f"AlibiBias({bias})(scores)", label, "bias", partial(_alibi, bias), scheme,
            differentiable=False,
        )  # fmt: skip
    for causal in (False, True):
        label = f"t5:num_buckets=32,max_distance=128,causal={causal}"
        yield make(
            f"T5MultiHeadAttention(is_decoder={causal}).compute_bias(Q, K)", label, "bias",
            partial(_t5, causal),
        )  # fmt: skip
    yield make(
        "SinePositionEncoding()(x, positions=pos)", "sinusoidal", "embedding", _sine,
        differentiable=False,
    )  # fmt: skip
    yield make(
        "PositionEmbedding(L)(x, positions=pos)", _LEARNED, "embedding", _table,
        differentiable=False,
    )  # fmt: skip


def _rotation(options: dict[str, Any], from_start: bool, sizes: Sizes) -> Callable[..., Any]:
    def f(x: Any, pos: Any) -> Any:
        rotary = RotaryEmbedding(**options, dtype=keras.backend.standardize_dtype(x.dtype))
        swapped = ops.swapaxes(x, 1, 2)
        if from_start:
            row = row_of(ops.convert_to_numpy(pos), in_order=False)
            tokens = [rotary(swapped[:, i : i + 1], start_index=int(n)) for i, n in enumerate(row)]
            return ops.swapaxes(ops.concatenate(tokens, axis=1), 1, 2)
        return ops.swapaxes(rotary(swapped, positions=pos), 1, 2)

    return f


def _no_layout(sizes: Sizes) -> Callable[..., Any]:
    raise CannotExpressError("it pairs channels D/2 apart, and has no option for adjacent ones")


def _no_part(sizes: Sizes) -> Callable[..., Any]:
    raise CannotExpressError("it rotates every channel; the caller would have to split them")


def _alibi(bias: int, sizes: Sizes) -> Callable[..., Any]:
    def build(heads: int, length: int) -> Any:
        added = AlibiBias(bias)(ops.zeros((1, heads, 1, length)))
        return ops.convert_to_numpy(added)[0, :, 0]

    f = bias_of_keys(build)

    def asked(num_heads: int, q_pos: Any, k_pos: Any) -> Any:
        host = f(num_heads, ops.convert_to_numpy(q_pos), ops.convert_to_numpy(k_pos))
        return ops.convert_to_tensor(host)

    return asked


def _t5(causal: bool, sizes: Sizes) -> Callable[..., Any]:
    layer = T5MultiHeadAttention(
        is_decoder=causal, hidden_dim=sizes.num_heads, key_value_dim=1, num_heads=sizes.num_heads,
        dropout=0.0,
    )  # fmt: skip
    layer.relative_attention_buckets, layer.relative_attention_max_distance = 32, 128

    def f(num_heads: int, q_pos: Any, k_pos: Any, table: Any) -> Any:
        queries, keys = square_of(*(np.asarray(ops.convert_to_numpy(p)) for p in (q_pos, k_pos)))
        if queries != keys:
            raise CannotExpressError("it counts queries from the first key")
        layer.relative_attention_bias = ops.transpose(table)
        return layer.compute_bias(queries, keys)[0]

    return f


def _sine(sizes: Sizes) -> Callable[..., Any]:
    layer, width = SinePositionEncoding(), sizes.num_heads * sizes.head_dim

    def f(pos: Any) -> Any:
        at = ops.cast(pos, "float32")
        return layer(ops.zeros((*pos.shape, width)), positions=at)

    return f


def _table(sizes: Sizes) -> Callable[..., Any]:
    table = params_of(_LEARNED, sizes)["table"]
    layer = PositionEmbedding(len(table))
    layer.build((1, *table.shape))
    layer.position_embeddings.assign(table)

    def f(pos: Any) -> Any:
        return layer(ops.zeros((*pos.shape, table.shape[1])), positions=pos)

    return f
