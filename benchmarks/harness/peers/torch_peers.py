"""Peers in PyTorch, each in its own words. Modules are imported when a call is made ready."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import posenc
from harness.peers.side import Difference, Inputs, Leaf, Peer, Side, Sizes
from posenc.schemes import catalogue
from posenc.testing.tolerances import UNIT

_BLHD, _LBHD = (0, 2, 1, 3), (2, 0, 1, 3)
_BOTH = ("eager", "compile")
_FORWARD = ("forward",)


def _angles(inputs: Inputs) -> float:
    """An angle ``pos * frequency`` has two roundings more than posenc's, and turns the channels.

    Powers and divisions of the frequency round four times more. All are relative to the position.
    """
    return 6 * UNIT["float32"] * inputs.sizes.length


FLOAT32_ANGLES = Difference("its angles are float32 products", _angles)


FLOAT32_SUMS = Difference(
    "sums of gates over all tokens are float32, in another order",
    lambda inputs: 4 * UNIT["float32"] * inputs.sizes.length,
)


# Rotations of queries and keys.


def _half_by_transformers(*, held: bool) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama as llama

        sizes, parameters = inputs.sizes, inputs.scheme.to_hf()
        longest = sizes.length
        if parameters["rope_type"] == "dynamic":  # takes the length in training from there
            longest = parameters.pop("original_max_position_embeddings")
        config = LlamaConfig(
            hidden_size=sizes.heads * sizes.dim, num_attention_heads=sizes.heads,
            head_dim=sizes.dim, max_position_embeddings=longest, rope_parameters=parameters,
        )  # fmt: skip
        rotary, at = llama.LlamaRotaryEmbedding(config), inputs.positions[None]
        angles = rotary(inputs.constant(inputs.host["q"]), at)

        def call(q: Any, k: Any) -> Any:
            return llama.apply_rotary_pos_emb(q, k, *(angles if held else rotary(q, at)))

        return Side(call, _tokens(inputs))

    return ready


def _gptj_by_transformers(inputs: Inputs) -> Side:
    from transformers.models.gptj import modeling_gptj as gptj

    sizes = inputs.sizes
    sin, cos = gptj.create_sinusoidal_positions(sizes.length, sizes.dim)[None].chunk(2, dim=-1)

    def call(q: Any, k: Any) -> Any:
        return tuple(gptj.apply_rotary_pos_emb(a, sin, cos) for a in (q, k))

    return Side(call, _tokens(inputs, _BLHD), _BLHD)


def _mrope_by_transformers(inputs: Inputs) -> Side:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

    sizes, scheme = inputs.sizes, inputs.scheme
    parameters = {"rope_theta": 10_000.0, "rope_type": "default"}
    config = Qwen2VLTextConfig(
        hidden_size=sizes.heads * sizes.dim, num_attention_heads=sizes.heads,
        rope_parameters=parameters | {"mrope_section": list(scheme.sections)},
    )  # fmt: skip
    rotary, at = qwen.Qwen2VLRotaryEmbedding(config), inputs.positions[None, None]
    apply = getattr(qwen, "apply_rotary_pos_emb", None) or qwen.apply_multimodal_rotary_pos_emb
    return Side(lambda q, k: apply(q, k, *rotary(q, at)), _tokens(inputs))


def _rotation_by_torchtune(inputs: Inputs) -> Side:
    from torchtune.modules import RotaryPositionalEmbeddings

    return _by_torchtune(inputs, RotaryPositionalEmbeddings(inputs.sizes.dim, inputs.sizes.length))


def _llama3_by_torchtune(inputs: Inputs) -> Side:
    from torchtune.models.llama3_1 import Llama3ScaledRoPE

    scaling = inputs.scheme.scaling
    rotary = Llama3ScaledRoPE(
        inputs.sizes.dim, inputs.sizes.length, int(inputs.scheme.base),
        scale_factor=scaling.factor, low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor, old_context_len=scaling.train_len,
    )  # fmt: skip
    return _by_torchtune(inputs, rotary)


def _by_torchtune(inputs: Inputs, rotary: Callable[[Any], Any]) -> Side:
    return Side(lambda q, k: (rotary(q), rotary(k)), _tokens(inputs, _BLHD), _BLHD)


def _by_rotary_embedding_torch(**options: Callable[[Inputs], Any]) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from rotary_embedding_torch import RotaryEmbedding

        rotary = RotaryEmbedding(
            inputs.sizes.dim, **{name: value(inputs) for name, value in options.items()}
        )
        if rotary.use_xpos:
            return Side(rotary.rotate_queries_and_keys, _tokens(inputs))

        def call(q: Any, k: Any) -> Any:
            return rotary.rotate_queries_or_keys(q), rotary.rotate_queries_or_keys(k)

        return Side(call, _tokens(inputs))

    return ready


def _by_x_transformers(**options: Callable[[Inputs], Any]) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

        rotary = RotaryEmbedding(
            inputs.sizes.dim, **{name: value(inputs) for name, value in options.items()}
        )

        def call(q: Any, k: Any) -> Any:
            angles, scale = rotary.forward_from_seq_len(inputs.sizes.length)
            inverse = 1.0 if isinstance(scale, float) else scale**-1
            return apply_rotary_pos_emb(q, angles, scale), apply_rotary_pos_emb(k, angles, inverse)

        return Side(call, _tokens(inputs))

    return ready


def _pope_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.x_transformers import PolarEmbedding, apply_polar_pos_emb

    polar = PolarEmbedding(inputs.sizes.dim, inputs.sizes.heads)
    polar.learned_bias = torch.nn.Parameter(inputs.leaf("params.delta").array.detach()[:, None])

    def call(q: Any, k: Any, own: Any) -> Any:
        angles, phases = polar(inputs.positions)
        return apply_polar_pos_emb(q, angles), apply_polar_pos_emb(k, angles + phases)

    return Side(call, {**_tokens(inputs), "params.delta": Leaf(polar.learned_bias, None)})


def _axial_by_rotary_embedding_torch(inputs: Inputs) -> Side:
    from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

    length, dim = inputs.sizes.length, inputs.sizes.dim
    rotary = RotaryEmbedding(dim // 2, theta=inputs.scheme.base)
    at = rotary(inputs.positions.float())  # text: the same coordinate on both axes
    angles = torch.cat([at, at], dim=-1).reshape(length, dim)

    def call(q: Any, k: Any) -> Any:
        return apply_rotary_emb(angles, q), apply_rotary_emb(angles, k)

    return Side(call, _tokens(inputs))


def _learned_frequencies_by_rotary_embedding_torch(inputs: Inputs) -> Side:
    from rotary_embedding_torch import RotaryEmbedding

    frequencies = inputs.scheme.frequencies() * np.exp(inputs.host["params.log_scale"])
    rotary = RotaryEmbedding(
        inputs.sizes.dim, custom_freqs=inputs.constant(np.float32(frequencies)), learned_freq=True
    )

    def call(q: Any, k: Any) -> Any:
        return rotary.rotate_queries_or_keys(q), rotary.rotate_queries_or_keys(k)

    return Side(call, _tokens(inputs))


# Embeddings.


def _sinusoidal_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.x_transformers import ScaledSinusoidalEmbedding

    dim = inputs.scheme.dim
    embedding = ScaledSinusoidalEmbedding(dim)
    embedding.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    x = inputs.constant(inputs.host["x"])
    return Side(lambda: embedding(x), {})


def _learned_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.x_transformers import AbsolutePositionalEmbedding

    leaf, x = inputs.leaf("params.table"), inputs.constant(inputs.host["x"])
    embedding = AbsolutePositionalEmbedding(leaf.array.shape[1], leaf.array.shape[0])
    embedding.scale = 1.0
    return _with_table(embedding.emb, leaf, lambda: embedding(x))


def _learned_by_torch(inputs: Inputs) -> Side:
    leaf, at = inputs.leaf("params.table"), inputs.positions
    embedding = torch.nn.Embedding(*leaf.array.shape)
    return _with_table(embedding, leaf, lambda: embedding(at))


def _learned_by_transformers(inputs: Inputs) -> Side:
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

    leaf, at = inputs.leaf("params.table"), inputs.positions[None]
    rows, dim = leaf.array.shape
    embedding = OPTLearnedPositionalEmbedding(rows - 2, dim)
    return _with_table(embedding, leaf, lambda: embedding(None, position_ids=at))


def _with_table(module: Any, leaf: Any, call: Callable[[], Any], axes: Any = None) -> Side:
    """A module with this table as its weights."""
    module.weight = torch.nn.Parameter(leaf.array.detach())
    return Side(lambda own: call(), {"params.table": Leaf(module.weight, leaf.axes)}, axes)


# The dense bias.


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


def _t5_of_transformers(inputs: Inputs) -> tuple[Any, Any]:
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
    attention.relative_attention_bias.weight = torch.nn.Parameter(leaf.array.detach())
    return attention, Leaf(attention.relative_attention_bias.weight, leaf.axes)


def _t5_by_transformers(inputs: Inputs) -> Side:
    attention, leaf = _t5_of_transformers(inputs)
    length = inputs.sizes.length
    return Side(lambda own: attention.compute_bias(length, length), {"params.table": leaf})


def _t5_of_x_transformers(inputs: Inputs) -> tuple[Any, Any]:
    from x_transformers.x_transformers import RelativePositionBias

    scheme = inputs.scheme
    bias = RelativePositionBias(
        1.0, scheme.causal, scheme.num_buckets, scheme.max_distance, scheme.num_heads
    )
    leaf = inputs.leaf("params.table", (1, 0))
    bias.relative_attention_bias.weight = torch.nn.Parameter(leaf.array.detach())
    return bias, Leaf(bias.relative_attention_bias.weight, leaf.axes)


def _t5_by_x_transformers(inputs: Inputs) -> Side:
    bias, leaf = _t5_of_x_transformers(inputs)
    length = inputs.sizes.length
    return Side(lambda own: bias(length, length), {"params.table": leaf})


# Attention as a whole, causal.


def _nope_by_torch(inputs: Inputs) -> Side:
    return Side(lambda q, k, v: sdpa(q, k, v, is_causal=True), _tokens(inputs, None, "v"))


def _alibi_mask_by_torch(inputs: Inputs) -> Side:
    """The whole bias as a mask, which a model makes once."""
    at = inputs.positions
    slopes = inputs.constant(np.float32(inputs.scheme.head_slopes()))
    mask = (slopes[:, None, None] * (at - at[:, None])).masked_fill(at > at[:, None], -torch.inf)
    return Side(lambda q, k, v: sdpa(q, k, v, attn_mask=mask[None]), _tokens(inputs, None, "v"))


def _alibi_attention_by_x_transformers(flash: bool) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from x_transformers.attend import Attend
        from x_transformers.x_transformers import AlibiPositionalBias

        length = inputs.sizes.length
        alibi, attend = AlibiPositionalBias(inputs.sizes.heads), Attend(causal=True, flash=flash)

        def call(q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v, attn_bias=alibi(length, length)[None])[0]

        return Side(call, _tokens(inputs, None, "v"))

    return ready


def _t5_attention_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.attend import Attend

    bias, leaf = _t5_of_x_transformers(inputs)
    attend, length = Attend(causal=True, flash=True), inputs.sizes.length

    def call(q: Any, k: Any, v: Any, own: Any) -> Any:
        return attend(q, k, v, attn_bias=bias(length, length)[None])[0]

    return Side(call, {**_tokens(inputs, None, "v"), "params.table": leaf})


def _t5_attention_by_transformers(how: str) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.models.t5.modeling_t5 import eager_attention_forward

        attention, leaf = _t5_of_transformers(inputs)
        attend = {"sdpa": sdpa_attention_forward, "eager": eager_attention_forward}[how]
        length, mask = inputs.sizes.length, _causal_mask(inputs)
        scale = inputs.sizes.dim**-0.5

        def call(q: Any, k: Any, v: Any, own: Any) -> Any:
            bias = attention.compute_bias(length, length)
            return attend(attention, q, k, v, mask, scaling=scale, position_bias=bias)[0]

        return Side(call, {**_tokens(inputs, None, "v"), "params.table": leaf}, _BLHD)

    return ready


def _shaw_by_transformers(inputs: Inputs) -> Side:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as wav2vec

    leaf, far = inputs.leaf("params.table"), inputs.scheme.max_distance
    embedding, mask = torch.nn.Embedding(*leaf.array.shape), _causal_mask(inputs)
    embedding.weight = torch.nn.Parameter(leaf.array.detach())
    layer = SimpleNamespace(
        distance_embedding=embedding, left_max_position_embeddings=far, training=False,
        right_max_position_embeddings=far, scaling=inputs.sizes.dim**-0.5, is_causal=False,
    )  # fmt: skip

    def call(q: Any, k: Any, v: Any, own: Any) -> Any:
        q, bias = wav2vec._apply_relative_key_position_encoding(layer, q, k)
        scale = layer.scaling
        return sdpa_attention_forward(layer, q, k, v, mask, scaling=scale, position_bias=bias)[0]

    leaves = {**_tokens(inputs, None, "v"), "params.table": Leaf(embedding.weight, None)}
    return Side(call, leaves, _BLHD)


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
    layer.r_w_bias, layer.r_r_bias = (torch.nn.Parameter(a.array.detach()) for a in (u, v))

    def call(q: Any, k: Any, values: Any, u: Any, v: Any, w: Any) -> Any:
        keys = torch.einsum("ibh,hnd->ibnd", places, w)
        return layer.rel_attn_core(q, k, values, keys, attn_mask=masked)

    tokens = _tokens(inputs, _LBHD, "v")
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

    return Side(call, {**_tokens(inputs, None, "v"), **own})


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

        return Side(call, _tokens(inputs, None, "v"))

    return ready


def _gates_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import DataDependentAlibi

    x, w, b = (inputs.leaf(name) for name in ("x", "params.w", "params.b"))
    gates = DataDependentAlibi(x.array.shape[-1], inputs.sizes.heads)
    linear, attend = gates.to_forget_gates[0], Attend(causal=True, flash=True)
    linear.weight, linear.bias = (torch.nn.Parameter(a.array.detach()) for a in (w, b))
    own = {"params.w": Leaf(linear.weight, None), "params.b": Leaf(linear.bias, None)}

    def call(q: Any, k: Any, v: Any, x: Any, *rest: Any) -> Any:
        return attend(q, k, v, attn_bias=gates(x))[0]

    return Side(call, {**_tokens(inputs, None, "v"), "x": x, **own})


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
    bias.distance_bank = torch.nn.Parameter(p.array.detach())
    own = {"params.w": Leaf(linear.weight, None), "params.p": Leaf(bias.distance_bank, None)}
    attend = Attend(causal=True, flash=True, scale=scheme.scale(inputs.sizes.dim))

    def call(q: Any, k: Any, v: Any, x: Any, *rest: Any) -> Any:
        return attend(q, k, v, attn_bias=bias(x))[0]

    return Side(call, {**_tokens(inputs, None, "v"), "x": x, **own})


def _cope_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import CoPE

    scheme, e = inputs.scheme, inputs.leaf("params.e")
    cope = CoPE(inputs.sizes.dim, inputs.sizes.heads, scheme.npos)
    cope.pos_emb = torch.nn.Parameter(e.array.detach())
    attend = Attend(causal=True, cope=cope)
    leaves = {**_tokens(inputs, None, "v"), "params.e": Leaf(cope.pos_emb, None)}
    return Side(lambda q, k, v, own: attend(q, k, v)[0], leaves)


def _sink_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.attend import Attend

    leaf = inputs.leaf("params.sink")
    attend = Attend(causal=True, heads=inputs.sizes.heads, head_learned_sink=True)
    attend.head_attn_sink = torch.nn.Parameter(leaf.array.detach())
    leaves = {**_tokens(inputs, None, "v"), "params.sink": Leaf(attend.head_attn_sink, None)}
    return Side(lambda q, k, v, own: attend(q, k, v)[0], leaves)


def _sink_by_transformers(inputs: Inputs) -> Side:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    mask, scale = _causal_mask(inputs), inputs.sizes.dim**-0.5

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        layer = SimpleNamespace(num_key_value_groups=1, sinks=sinks, training=False)
        return eager_attention_forward(layer, q, k, v, mask, scale)[0]

    return Side(
        call, {**_tokens(inputs, None, "v"), "params.sink": inputs.leaf("params.sink")}, _BLHD
    )


def _causal_mask(inputs: Inputs) -> Any:
    """As transformers adds it to scores."""
    at = inputs.positions
    mask = torch.zeros(1, 1, *2 * at.shape)
    return mask.masked_fill_(at > at[:, None], torch.finfo(torch.float32).min)


def _tokens(inputs: Inputs, axes: Any = None, *more: str) -> dict[str, Any]:
    return {name: inputs.leaf(name, axes) for name in ("q", "k", *more)}


def _written_by_transformers(sizes: Sizes) -> list[str]:
    """Names of the catalogue that a configuration of transformers can say."""
    found = []
    for name, make in catalogue().items():
        scheme = make(**{**sizes.of_model, "dim": 64, "hidden_dim": 64})
        try:
            if isinstance(scheme, posenc.RoPE) and scheme.to_hf() is not None:
                found.append(name)
        except ValueError:
            continue
    return found


def _sections(sizes: Sizes) -> dict[str, Any]:
    """Pairs that turn by time, height and width, in the proportions of Qwen2-VL."""
    pairs = sizes.dim // 2
    return {"sections": (pairs // 4, pairs * 3 // 8, pairs - pairs // 4 - pairs * 3 // 8)}


def _rotations() -> list[Peer]:
    def rotation(library: str, scheme: str, call: str, ready: Any, **more: Any) -> Peer:
        more = {"stage": "transform", "modes": _BOTH, "differs": FLOAT32_ANGLES, **more}
        return Peer(library, scheme, call=call, ready=ready, **more)

    inner, eager = {"layout": "interleaved"}, ("eager",)
    x, lucid = "x-transformers", "rotary-embedding-torch"
    scaled = {
        "rope_pi": (
            {"interpolation_factor": lambda i: i.scheme.scaling.factor},
            {"interpolate_factor": lambda i: i.scheme.scaling.factor},
        ),
        "rope_ntk": (
            {"base_rescale_factor": lambda i: i.scheme.scaling.factor},
            {"theta_rescale_factor": lambda i: i.scheme.scaling.factor},
        ),
    }
    peers = [
        rotation(
            "transformers", name, "llama.apply_rotary_pos_emb(q, k, *rotary(q, at))",
            _half_by_transformers(held=False), modes=_BOTH if name == "rope" else eager,
        )
        for name in _written_by_transformers(Sizes(2, 64, 16))
    ]  # fmt: skip
    peers += [
        rotation("transformers", "rope", "llama.apply_rotary_pos_emb(q, k, cos, sin)",
                 _half_by_transformers(held=True), stage="rotation"),
        rotation(lucid, "rope", "RotaryEmbedding(D).rotate_queries_or_keys(q)",
                 _by_rotary_embedding_torch(), options=inner),
        rotation(x, "rope", "apply_rotary_pos_emb(q, *RotaryEmbedding(D).forward_from_seq_len(L))",
                 _by_x_transformers(), options=inner),
        rotation("torchtune", "rope_llama3", "Llama3ScaledRoPE(D, L)(q)",
                 _llama3_by_torchtune, options=inner, modes=eager),
        rotation("transformers", "mrope", "qwen2_vl.apply_rotary_pos_emb(q, k, *rotary(q, at))",
                 _mrope_by_transformers, options=_sections, modes=eager),
        rotation(lucid, "learned_rope", "RotaryEmbedding(D, learned_freq=True)",
                 _learned_frequencies_by_rotary_embedding_torch, options=inner, modes=eager,
                 passes=_FORWARD),
        rotation(lucid, "axial_rope", "apply_rotary_emb(angles, q)",
                 _axial_by_rotary_embedding_torch, modes=eager),
        rotation(x, "pope", "apply_polar_pos_emb(q, PolarEmbedding(D, H)(at)[0])",
                 _pope_by_x_transformers, modes=eager),
    ]  # fmt: skip
    for stage in ("transform", "rotation"):  # these always have their angles before
        peers += [
            rotation("transformers", "rope", "gptj.apply_rotary_pos_emb(q, sin, cos)",
                     _gptj_by_transformers, options=inner, stage=stage),
            rotation("torchtune", "rope", "RotaryPositionalEmbeddings(D, L)(q)",
                     _rotation_by_torchtune, options=inner, stage=stage),
        ]  # fmt: skip
    for name, (of_x, of_lucid) in scaled.items():
        peers += [
            rotation(x, name, f"RotaryEmbedding(D, {next(iter(of_x))}=factor)",
                     _by_x_transformers(**of_x), options=inner, modes=eager),
            rotation(lucid, name, f"RotaryEmbedding(D, {next(iter(of_lucid))}=factor)",
                     _by_rotary_embedding_torch(**of_lucid), options=inner, modes=eager),
        ]  # fmt: skip

    def centred(sizes: Sizes) -> dict[str, Any]:
        return {**inner, "center": sizes.length // 2}

    xpos = {"use_xpos": lambda i: True}
    peers += [
        rotation(x, "xpos", "RotaryEmbedding(D, use_xpos=True)",
                 _by_x_transformers(**xpos), options=centred, modes=eager),
        rotation(lucid, "xpos", "RotaryEmbedding(D, use_xpos=True).rotate_queries_and_keys(q, k)",
                 _by_rotary_embedding_torch(**xpos), options=centred, modes=eager),
    ]  # fmt: skip
    return peers


_T5 = {"num_buckets": 32, "max_distance": 128}
T5_BIAS, _T5_CAUSAL = {**_T5, "causal": False}, {**_T5, "causal": True}


def peers() -> list[Peer]:
    """Every peer in PyTorch."""
    eager = ("eager",)
    x = "x-transformers"
    return [
        *_rotations(),
        Peer(x, "alibi", "bias", "AlibiPositionalBias(H).forward_custom_pos(at)",
             _alibi_by_x_transformers, _BOTH),
        Peer("torch", "alibi", "bias", "bias.clone(), the floor", _copy, eager, passes=_FORWARD),
        Peer("torch", "t5", "bias", "bias.clone(), the floor", _copy, eager, T5_BIAS,
             passes=_FORWARD),
        Peer("transformers", "t5", "bias", "T5Attention.compute_bias(L, L)", _t5_by_transformers,
             _BOTH, T5_BIAS),
        Peer(x, "t5", "bias", "RelativePositionBias(1)(L, L)", _t5_by_x_transformers, _BOTH,
             T5_BIAS),
        Peer(x, "sinusoidal", "embedding", "ScaledSinusoidalEmbedding(dim)(x)",
             _sinusoidal_by_x_transformers, _BOTH, {"layout": "concatenated"},
             differs=FLOAT32_ANGLES),
        Peer("torch", "learned", "embedding", "nn.Embedding(L, dim)(at)", _learned_by_torch, eager),
        Peer(x, "learned", "embedding", "AbsolutePositionalEmbedding(dim, L)(x)",
             _learned_by_x_transformers, eager),
        Peer("transformers", "learned", "embedding", "OPTLearnedPositionalEmbedding(L, dim)(at)",
             _learned_by_transformers, eager, {"offset": 2}),
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
             eager, passes=_FORWARD),
        Peer("attn-gym", "sandwich", "attention",
             "flex_attention(score_mod=generate_sandwich_bias(H, L)), compiled",
             _flex_by_attn_gym(lambda i, mods: mods.generate_sandwich_bias(
                 i.sizes.heads, i.sizes.length, i.scheme.dim)),
             eager, passes=_FORWARD),
        Peer("transformers", "t5", "attention", "sdpa_attention_forward(position_bias)",
             _t5_attention_by_transformers("sdpa"), eager, _T5_CAUSAL),
        Peer("transformers", "t5", "attention", "t5.eager_attention_forward(position_bias)",
             _t5_attention_by_transformers("eager"), eager, _T5_CAUSAL),
        Peer(x, "t5", "attention", "Attend(flash=True)(q, k, v, attn_bias)",
             _t5_attention_by_x_transformers, eager, _T5_CAUSAL),
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
             _cope_by_x_transformers, eager),
        Peer(x, "sink", "attention", "Attend(head_learned_sink=True)(q, k, v)",
             _sink_by_x_transformers, eager),
        Peer("transformers", "sink", "attention", "gpt_oss.eager_attention_forward",
             _sink_by_transformers, eager),
    ]  # fmt: skip
