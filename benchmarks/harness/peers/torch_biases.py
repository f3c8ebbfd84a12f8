"""PyTorch libraries' dense biases, each in its own words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import posenc
from harness.peers.side import T5_BIAS, Inputs, Leaf, Peer, Side
from harness.peers.torch_weights import weight

_BOTH, _COMPILED = ("eager", "compile"), ("compile",)


def _alibi_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.x_transformers import AlibiPositionalBias

    alibi, at = AlibiPositionalBias(inputs.sizes.heads), inputs.positions
    return Side(lambda: alibi.forward_custom_pos(at), {})


def _copy(inputs: Inputs) -> Side:
    """The least that a dense bias takes: to write it."""
    bias = posenc.bias(inputs.scheme, inputs.positions, inputs.positions, {
        name: inputs.constant(inputs.host[f"params.{name}"]) for name in inputs.params
    })  # fmt: skip
    return Side(lambda *own: bias.clone(), {})


def t5_of_transformers(inputs: Inputs) -> tuple[Any, Leaf]:
    """A layer of transformers whose table is posenc's, and the table."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    sizes, scheme = inputs.sizes, inputs.scheme
    config = T5Config(
        d_model=sizes.heads, num_heads=sizes.heads, d_kv=sizes.dim, is_decoder=scheme.causal,
        relative_attention_num_buckets=scheme.num_buckets,
        relative_attention_max_distance=scheme.max_distance,
    )  # fmt: skip
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    leaf = inputs.leaf("params.table", (1, 0))
    attention.relative_attention_bias.weight = weight(leaf)
    return attention, Leaf(attention.relative_attention_bias.weight, leaf.axes)


def _t5_by_transformers(inputs: Inputs) -> Side:
    attention, leaf = t5_of_transformers(inputs)
    length = inputs.sizes.length
    return Side(lambda own: attention.compute_bias(length, length), {"params.table": leaf})


def t5_of_x_transformers(inputs: Inputs) -> tuple[Any, Leaf]:
    """A bias of x-transformers whose table is posenc's, and the table."""
    from x_transformers.x_transformers import RelativePositionBias

    scheme = inputs.scheme
    bias = RelativePositionBias(
        1.0, scheme.causal, scheme.num_buckets, scheme.max_distance, scheme.num_heads
    )
    leaf = inputs.leaf("params.table", (1, 0))
    bias.relative_attention_bias.weight = weight(leaf)
    return bias, Leaf(bias.relative_attention_bias.weight, leaf.axes)


def _t5_by_x_transformers(inputs: Inputs) -> Side:
    bias, leaf = t5_of_x_transformers(inputs)
    length = inputs.sizes.length
    return Side(lambda own: bias(length, length), {"params.table": leaf})


def _in_rows(make: Callable[[Inputs], Side]) -> Callable[[Inputs], Side]:
    """The same bias with keys along memory, as posenc's is and as SDPA reads one.

    What a peer returns is a view of ``(Q, K, H)``. That costs a compiler less than rows do.
    """

    def side(inputs: Inputs) -> Side:
        own = make(inputs)
        return replace(own, call=lambda *leaves: own.call(*leaves).contiguous())

    return side


def peers() -> list[Peer]:
    """Every dense bias."""
    x, eager = "x-transformers", ("eager",)
    return [
        Peer(x, "alibi", "bias", "AlibiPositionalBias(H).forward_custom_pos(at)",
             _alibi_by_x_transformers, _BOTH),
        Peer("torch", "alibi", "bias", "bias.clone(), the floor", _copy, eager,
             passes=("forward",)),
        Peer("torch", "t5", "bias", "bias.clone(), the floor", _copy, eager, T5_BIAS,
             passes=("forward",)),
        Peer("transformers", "t5", "bias", "T5Attention.compute_bias(L, L)", _t5_by_transformers,
             _BOTH, T5_BIAS),
        Peer(x, "t5", "bias", "RelativePositionBias(1)(L, L)", _t5_by_x_transformers, _BOTH,
             T5_BIAS),
        Peer("transformers", "t5", "bias", "T5Attention.compute_bias(L, L).contiguous()",
             _in_rows(_t5_by_transformers), _COMPILED, T5_BIAS),
        Peer(x, "t5", "bias", "RelativePositionBias(1)(L, L).contiguous()",
             _in_rows(_t5_by_x_transformers), _COMPILED, T5_BIAS),
    ]  # fmt: skip
