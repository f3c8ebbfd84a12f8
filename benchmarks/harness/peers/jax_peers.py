"""Peers in JAX, each in its own words. Keras runs on JAX here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness.peers.side import BLHD, FLOAT32_ANGLES, T5_BIAS, Inputs, Peer, Side

_JIT = ("jit",)


def _half_by_equinox(inputs: Inputs) -> Side:
    import equinox as eqx

    rope = jax.vmap(jax.vmap(eqx.nn.RotaryPositionalEmbedding(inputs.sizes.dim)))
    return Side(lambda q, k: (rope(q), rope(k)), inputs.tokens())


def _half_by_keras_hub(**options: Callable[[Inputs], Any]) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from keras_hub.layers import RotaryEmbedding

        rope = RotaryEmbedding(
            max_wavelength=inputs.scheme.base,
            **{name: value(inputs) for name, value in options.items()},
        )
        return Side(lambda q, k: (rope(q), rope(k)), inputs.tokens(BLHD), BLHD)

    return ready


def _sinusoidal_by_keras_hub(inputs: Inputs) -> Side:
    from keras_hub.layers import SinePositionEncoding

    embedding, x = SinePositionEncoding(), inputs.constant(inputs.host["x"])
    return Side(lambda: embedding(x), {})


def _learned_by_keras_hub(inputs: Inputs) -> Side:
    from keras_hub.layers import PositionEmbedding

    leaf, x = inputs.leaf("params.table"), inputs.constant(inputs.host["x"])
    embedding = PositionEmbedding(leaf.array.shape[0])
    embedding.build(x.shape)

    def call(table: Any) -> Any:
        return embedding.stateless_call([table], [], x)[0]

    return Side(call, {"params.table": leaf})


def _learned_by_equinox(inputs: Inputs) -> Side:
    import equinox as eqx

    at = inputs.positions
    return Side(
        lambda table: jax.vmap(eqx.nn.Embedding(weight=table))(at),
        {"params.table": inputs.leaf("params.table")},
    )


def _t5_by_keras_hub(inputs: Inputs) -> Side:
    from keras_hub.src.models.t5.t5_multi_head_attention import T5MultiHeadAttention

    scheme, length = inputs.scheme, inputs.sizes.length
    layer = T5MultiHeadAttention(
        is_decoder=scheme.causal, hidden_dim=scheme.num_heads, key_value_dim=inputs.sizes.dim,
        num_heads=scheme.num_heads, dropout=0.0,
    )  # fmt: skip
    layer.relative_attention_buckets = scheme.num_buckets
    layer.relative_attention_max_distance = scheme.max_distance

    def call(table: Any) -> Any:
        layer.relative_attention_bias = table
        return layer.compute_bias(length, length)

    return Side(call, {"params.table": inputs.leaf("params.table", (1, 0))})


def _attention(make: Callable[[], Callable[..., Any]], **fixed: Any) -> Callable[[Inputs], Side]:
    """A function of q, k and v ``(B, L, H, D)``."""

    def ready(inputs: Inputs) -> Side:
        attend = make()
        return Side(
            lambda q, k, v: attend(q, k, v, is_causal=True, **fixed),
            inputs.tokens(BLHD, "v"),
            BLHD,
        )

    return ready


def _alibi_attention(
    make: Callable[[], Callable[..., Any]], **fixed: Any
) -> Callable[[Inputs], Side]:
    """The same with the whole bias, which a model makes once."""

    def ready(inputs: Inputs) -> Side:
        attend, at = make(), np.arange(inputs.sizes.length)
        slopes = np.float32(inputs.scheme.head_slopes())[:, None, None]
        bias = inputs.constant(np.float32(slopes * (at - at[:, None]))[None])

        def call(q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v, bias=bias, is_causal=True, **fixed)

        return Side(call, inputs.tokens(BLHD, "v"), BLHD)

    return ready


def _nope_by_equinox(inputs: Inputs) -> Side:
    from equinox.nn._attention import dot_product_attention

    mask = jnp.tril(jnp.ones((inputs.sizes.length,) * 2, bool))
    heads = jax.vmap(jax.vmap(lambda q, k, v: dot_product_attention(q, k, v, mask)))
    return Side(heads, inputs.tokens(None, "v"))


def _alibi_by_keras_hub(inputs: Inputs) -> Side:
    from keras import ops
    from keras_hub.layers import AlibiBias

    alibi, at = AlibiBias(), inputs.positions
    later, scale = at > at[:, None], inputs.sizes.dim**-0.5

    def call(q: Any, k: Any, v: Any) -> Any:
        scores = alibi(ops.matmul(q, ops.swapaxes(k, -1, -2)) * scale)
        weights = ops.softmax(ops.where(later, jnp.finfo(jnp.float32).min, scores))
        return ops.matmul(weights, v)

    return Side(call, inputs.tokens(None, "v"))


def _jax_nn() -> Callable[..., Any]:
    return jax.nn.dot_product_attention


def _tokamax() -> Callable[..., Any]:
    import tokamax
    from absl import flags

    if not flags.FLAGS.is_parsed():  # it would read the options of this command as its own
        flags.FLAGS.mark_as_parsed()
    return tokamax.dot_product_attention


def peers() -> list[Peer]:
    """Every peer in JAX."""
    keras = "keras-hub"
    yarn = {
        "rope_type": lambda i: "yarn",
        "scaling_factor": lambda i: i.scheme.scaling.factor,
        "original_max_position_embeddings": lambda i: i.scheme.scaling.train_len,
    }
    linear = {"scaling_factor": lambda i: i.scheme.scaling.factor}
    fixed = {"implementation": "xla"}, {"implementation": "xla_chunked"}
    return [
        *[
            Peer("equinox", "rope", stage, "vmap(vmap(RotaryPositionalEmbedding(D)))(q)",
                 _half_by_equinox, _JIT, differs=FLOAT32_ANGLES)
            for stage in ("transform", "rotation")  # it has its angles as constants
        ],
        Peer(keras, "rope", "transform", "RotaryEmbedding()(q)", _half_by_keras_hub(), _JIT,
             differs=FLOAT32_ANGLES),
        Peer(keras, "rope_pi", "transform", "RotaryEmbedding(scaling_factor=factor)(q)",
             _half_by_keras_hub(**linear), _JIT, differs=FLOAT32_ANGLES),
        Peer(keras, "rope_yarn", "transform", "RotaryEmbedding(rope_type='yarn')(q)",
             _half_by_keras_hub(**yarn), _JIT, differs=FLOAT32_ANGLES),
        Peer(keras, "sinusoidal", "embedding", "SinePositionEncoding()(x)",
             _sinusoidal_by_keras_hub, _JIT, differs=FLOAT32_ANGLES),
        Peer(keras, "learned", "embedding", "PositionEmbedding(L)(x)", _learned_by_keras_hub, _JIT),
        Peer("equinox", "learned", "embedding", "vmap(nn.Embedding(weight=table))(at)",
             _learned_by_equinox, _JIT),
        Peer(keras, "t5", "bias", "T5MultiHeadAttention.compute_bias(L, L)", _t5_by_keras_hub,
             _JIT, T5_BIAS),
        Peer("jax", "nope", "attention", "jax.nn.dot_product_attention(is_causal=True)",
             _attention(_jax_nn, **fixed[0]), _JIT),
        Peer("tokamax", "nope", "attention", "dot_product_attention(is_causal=True)",
             _attention(_tokamax, **fixed[0]), _JIT),
        Peer("tokamax", "nope", "attention", "dot_product_attention(implementation='xla_chunked')",
             _attention(_tokamax, **fixed[1]), _JIT),
        Peer("equinox", "nope", "attention", "dot_product_attention(q, k, v, mask)",
             _nope_by_equinox, _JIT),
        Peer("jax", "alibi", "attention", "jax.nn.dot_product_attention(bias=bias)",
             _alibi_attention(_jax_nn, **fixed[0]), _JIT),
        Peer("tokamax", "alibi", "attention", "dot_product_attention(bias=bias)",
             _alibi_attention(_tokamax, **fixed[0]), _JIT),
        Peer("tokamax", "alibi", "attention", "dot_product_attention(bias, 'xla_chunked')",
             _alibi_attention(_tokamax, **fixed[1]), _JIT),
        Peer(keras, "alibi", "attention", "AlibiBias()(scores)", _alibi_by_keras_hub, _JIT),
    ]  # fmt: skip
