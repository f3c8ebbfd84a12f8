"""PyTorch libraries' causal attention as a whole, each in its own words."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from harness.peers.side import (
    BLHD,
    FLOAT32_ANGLES,
    FLOAT32_SUMS,
    KINKS,
    T5_CAUSAL,
    Inputs,
    Leaf,
    Peer,
    Side,
)
from harness.peers.torch_biases import t5_of_transformers, t5_of_x_transformers
from harness.peers.torch_weights import weight

_LBHD = (2, 0, 1, 3)


def _nope_by_torch(inputs: Inputs) -> Side:
    return Side(lambda q, k, v: sdpa(q, k, v, is_causal=True), inputs.tokens(None, "v"))


def _alibi_mask_by_torch(inputs: Inputs) -> Side:
    """The whole bias as a mask, which a model makes once."""
    at = inputs.positions
    slopes = inputs.constant(np.float32(inputs.scheme.head_slopes()))
    mask = (slopes[:, None, None] * (at - at[:, None])).masked_fill(at > at[:, None], -torch.inf)
    return Side(lambda q, k, v: sdpa(q, k, v, attn_mask=mask[None]), inputs.tokens(None, "v"))


def _alibi_attention_by_x_transformers(flash: bool) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from x_transformers.attend import Attend
        from x_transformers.x_transformers import AlibiPositionalBias

        length = inputs.sizes.length
        alibi, attend = AlibiPositionalBias(inputs.sizes.heads), Attend(causal=True, flash=flash)

        def call(q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v, attn_bias=alibi(length, length)[None])[0]

        return Side(call, inputs.tokens(None, "v"))

    return ready


def _t5_attention_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.attend import Attend

    bias, leaf = t5_of_x_transformers(inputs)
    attend, length = Attend(causal=True, flash=True), inputs.sizes.length

    def call(q: Any, k: Any, v: Any, own: Any) -> Any:
        return attend(q, k, v, attn_bias=bias(length, length)[None])[0]

    return Side(call, {**inputs.tokens(None, "v"), "params.table": leaf})


def _t5_attention_by_transformers(how: str) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.models.t5.modeling_t5 import eager_attention_forward

        attention, leaf = t5_of_transformers(inputs)
        attend = {"sdpa": sdpa_attention_forward, "eager": eager_attention_forward}[how]
        length, mask = inputs.sizes.length, _causal_mask(inputs)
        scale = inputs.sizes.dim**-0.5

        def call(q: Any, k: Any, v: Any, own: Any) -> Any:
            bias = attention.compute_bias(length, length)
            return attend(attention, q, k, v, mask, scaling=scale, position_bias=bias)[0]

        return Side(call, {**inputs.tokens(None, "v"), "params.table": leaf}, BLHD)

    return ready


def _shaw_by_transformers(inputs: Inputs) -> Side:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as wav2vec

    leaf, far = inputs.leaf("params.table"), inputs.scheme.max_distance
    embedding, mask = torch.nn.Embedding(*leaf.array.shape), _causal_mask(inputs)
    embedding.weight = weight(leaf)
    layer = SimpleNamespace(
        distance_embedding=embedding, left_max_position_embeddings=far, training=False,
        right_max_position_embeddings=far, scaling=inputs.sizes.dim**-0.5, is_causal=False,
    )  # fmt: skip

    def call(q: Any, k: Any, v: Any, own: Any) -> Any:
        q, bias = wav2vec._apply_relative_key_position_encoding(layer, q, k)
        scale = layer.scaling
        return sdpa_attention_forward(layer, q, k, v, mask, scaling=scale, position_bias=bias)[0]

    leaves = {**inputs.tokens(None, "v"), "params.table": Leaf(embedding.weight, None)}
    return Side(call, leaves, BLHD)


def _xl_by_transformers(inputs: Inputs) -> Side:
    from transformers import XLNetConfig
    from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

    length, heads, dim = inputs.sizes.length, inputs.sizes.heads, inputs.scheme.dim
    config = XLNetConfig(d_model=dim, n_head=heads, dropout=0.0)
    layer = XLNetRelativeAttention(config).eval()
    model = SimpleNamespace(
        d_model=dim, attn_type="uni", bi_data=False, clamp_len=-1,
        positional_embedding=XLNetModel.positional_embedding,
    )  # fmt: skip
    places = XLNetModel.relative_positional_encoding(model, length, length, 1)
    at = inputs.positions
    masked = (at > at[:, None]).float()[:, :, None, None]
    u, v = inputs.leaf("params.u"), inputs.leaf("params.v")
    w = inputs.leaf("params.w", (2, 0, 1))
    layer.r_w_bias, layer.r_r_bias = (weight(a) for a in (u, v))

    def call(q: Any, k: Any, values: Any, u: Any, v: Any, w: Any) -> Any:
        keys = torch.einsum("ibh,hnd->ibnd", places, w)
        return layer.rel_attn_core(q, k, values, keys, attn_mask=masked)

    tokens = inputs.tokens(_LBHD, "v")
    biases = {"params.u": Leaf(layer.r_w_bias, None), "params.v": Leaf(layer.r_r_bias, None)}
    return Side(call, {**tokens, **biases, "params.w": w}, _LBHD)


def _deberta_by_transformers(inputs: Inputs) -> Side:
    from transformers import DebertaConfig
    from transformers.models.deberta import modeling_deberta as deberta

    sizes, scheme = inputs.sizes, inputs.scheme
    width = sizes.heads * sizes.dim
    config = DebertaConfig(
        hidden_size=width, num_attention_heads=sizes.heads, relative_attention=True,
        max_relative_positions=scheme.max_distance, pos_att_type=["c2p", "p2c"],
    )  # fmt: skip
    layer = deberta.DisentangledSelfAttention(config).eval()
    own = {name: inputs.leaf(name, (1, 0, 2)) for name in ("params.p_k", "params.p_q")}
    unused, at = torch.zeros(2 * scheme.max_distance, width), inputs.positions
    later = at > at[:, None]

    def call(q: Any, k: Any, v: Any, p_k: Any, p_q: Any) -> Any:
        # The projections of the table, as leaves; a copy, because the layer scales it in place.
        layer.__dict__["pos_proj"] = lambda table: p_k.reshape(1, -1, width)
        layer.__dict__["pos_q_proj"] = lambda table: 1.0 * p_q.reshape(1, -1, width)
        q = q / deberta.scaled_size_sqrt(q, 3)
        pairs = deberta.build_relative_position(q, k)
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores + layer.disentangled_att_bias(q, k, pairs, unused, 3)
        scores = scores.masked_fill(later, torch.finfo(torch.float32).min)
        return torch.matmul(torch.softmax(scores, dim=-1), v)

    return Side(call, {**inputs.tokens(None, "v"), **own})


def _flex_by_attn_gym(make: Callable[[Inputs, Any], Any]) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from attn_gym import mods
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        length = inputs.sizes.length
        blocks = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device="cpu"
        )
        program, score_mod = torch.compile(flex_attention), make(inputs, mods)

        def call(q: Any, k: Any, v: Any) -> Any:
            # On a CPU FlexAttention refuses tensors that ask for gradients.
            q, k, v = (a.detach() for a in (q, k, v))
            return program(q, k, v, score_mod=score_mod, block_mask=blocks)

        return Side(call, inputs.tokens(None, "v"))

    return ready


def _gates_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import DataDependentAlibi

    x, w, b = (inputs.leaf(name) for name in ("x", "params.w", "params.b"))
    gates = DataDependentAlibi(x.array.shape[-1], inputs.sizes.heads)
    linear, attend = gates.to_forget_gates[0], Attend(causal=True, flash=True)
    linear.weight, linear.bias = (weight(a) for a in (w, b))
    own = {"params.w": Leaf(linear.weight, None), "params.b": Leaf(linear.bias, None)}

    def call(q: Any, k: Any, v: Any, x: Any, *rest: Any) -> Any:
        return attend(q, k, v, attn_bias=gates(x))[0]

    return Side(call, {**inputs.tokens(None, "v"), "x": x, **own})


def _inkling_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import RelativeProjPositionalBias

    scheme = inputs.scheme
    x, w, p = (inputs.leaf(name) for name in ("x", "params.w", "params.p"))
    bias = RelativeProjPositionalBias(
        scheme.hidden_dim, scheme.num_heads, scheme.rank, scheme.extent
    )
    linear = bias.to_distance_weights[0]
    linear.weight = torch.nn.Parameter(w.array.detach().reshape(-1, scheme.hidden_dim))
    linear.bias = torch.nn.Parameter(torch.zeros_like(linear.bias), requires_grad=False)
    bias.distance_bank = weight(p)
    own = {"params.w": Leaf(linear.weight, None), "params.p": Leaf(bias.distance_bank, None)}
    attend = Attend(causal=True, flash=True, scale=scheme.scale(inputs.sizes.dim))

    def call(q: Any, k: Any, v: Any, x: Any, *rest: Any) -> Any:
        return attend(q, k, v, attn_bias=bias(x))[0]

    return Side(call, {**inputs.tokens(None, "v"), "x": x, **own})


def _cope_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import CoPE

    scheme, e = inputs.scheme, inputs.leaf("params.e")
    cope = CoPE(inputs.sizes.dim, inputs.sizes.heads, scheme.npos)
    cope.pos_emb = weight(e)
    attend = Attend(causal=True, cope=cope)
    leaves = {**inputs.tokens(None, "v"), "params.e": Leaf(cope.pos_emb, None)}
    return Side(lambda q, k, v, own: attend(q, k, v)[0], leaves)


def _sink_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.attend import Attend

    leaf = inputs.leaf("params.sink")
    attend = Attend(causal=True, heads=inputs.sizes.heads, head_learned_sink=True)
    attend.head_attn_sink = weight(leaf)
    leaves = {**inputs.tokens(None, "v"), "params.sink": Leaf(attend.head_attn_sink, None)}
    return Side(lambda q, k, v, own: attend(q, k, v)[0], leaves)


def _sink_by_transformers(inputs: Inputs) -> Side:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    mask, scale = _causal_mask(inputs), inputs.sizes.dim**-0.5

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        layer = SimpleNamespace(num_key_value_groups=1, sinks=sinks, training=False)
        return eager_attention_forward(layer, q, k, v, mask, scale)[0]

    return Side(call, {**inputs.tokens(None, "v"), "params.sink": inputs.leaf("params.sink")}, BLHD)


def _causal_mask(inputs: Inputs) -> Any:
    """As transformers adds it to scores."""
    at = inputs.positions
    mask = torch.zeros(1, 1, *2 * at.shape)
    return mask.masked_fill_(at > at[:, None], torch.finfo(torch.float32).min)


def peers() -> list[Peer]:
    """Every attention."""
    x, eager = "x-transformers", ("eager",)
    return [
        Peer("torch", "nope", "attention", "scaled_dot_product_attention(is_causal=True)",
             _nope_by_torch, eager),
        Peer("torch", "alibi", "attention", "scaled_dot_product_attention(attn_mask=bias)",
             _alibi_mask_by_torch, eager),
        Peer(x, "alibi", "attention", "Attend(flash=True)(q, k, v, attn_bias)",
             _alibi_attention_by_x_transformers(True), eager),
        Peer(x, "alibi", "attention", "Attend()(q, k, v, attn_bias)",
             _alibi_attention_by_x_transformers(False), eager),
        Peer("attn-gym", "alibi", "attention",
             "flex_attention(score_mod=generate_alibi_bias(H)), compiled",
             _flex_by_attn_gym(lambda i, mods: mods.generate_alibi_bias(i.sizes.heads)),
             eager, passes=("forward",)),
        Peer("attn-gym", "sandwich", "attention",
             "flex_attention(score_mod=generate_sandwich_bias(H, L)), compiled",
             _flex_by_attn_gym(lambda i, mods: mods.generate_sandwich_bias(
                 i.sizes.heads, i.sizes.length, i.scheme.dim)),
             eager, passes=("forward",)),
        Peer("transformers", "t5", "attention", "sdpa_attention_forward(position_bias)",
             _t5_attention_by_transformers("sdpa"), eager, T5_CAUSAL),
        Peer("transformers", "t5", "attention", "t5.eager_attention_forward(position_bias)",
             _t5_attention_by_transformers("eager"), eager, T5_CAUSAL),
        Peer(x, "t5", "attention", "Attend(flash=True)(q, k, v, attn_bias)",
             _t5_attention_by_x_transformers, eager, T5_CAUSAL),
        Peer("transformers", "shaw", "attention", "wav2vec2_bert, position_embeddings_type="
             "'relative_key'", _shaw_by_transformers, eager, {"max_distance": 64}),
        Peer("transformers", "transformer_xl", "attention", "XLNetRelativeAttention.rel_attn_core",
             _xl_by_transformers, eager, lambda s: {"max_distance": s.length},
             differs=FLOAT32_ANGLES),
        Peer("transformers", "deberta", "attention",
             "deberta: DisentangledSelfAttention.disentangled_att_bias", _deberta_by_transformers,
             eager, lambda s: {"buckets": None, "max_distance": min(512, s.length)}),
        Peer(x, "fox", "attention", "Attend(flash=True)(q, k, v, attn_bias=DataDependentAlibi(x))",
             _gates_by_x_transformers, eager, differs=FLOAT32_SUMS),
        Peer(x, "inkling", "attention",
             "Attend(flash=True)(q, k, v, attn_bias=RelativeProjPositionalBias(x))",
             _inkling_by_x_transformers, eager),
        Peer(x, "cope", "attention", "Attend(cope=CoPE(D, H, 64))(q, k, v)",
             _cope_by_x_transformers, eager, differs=KINKS),
        Peer(x, "sink", "attention", "Attend(head_learned_sink=True)(q, k, v)",
             _sink_by_x_transformers, eager),
        Peer("transformers", "sink", "attention", "gpt_oss.eager_attention_forward",
             _sink_by_transformers, eager),

    ]  # fmt: skip
