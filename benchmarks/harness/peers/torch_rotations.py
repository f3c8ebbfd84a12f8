"""PyTorch libraries' rotations of queries and keys, each in its own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import posenc
from harness.peers.side import BLHD, FLOAT32_ANGLES, Inputs, Leaf, Peer, Side, Sizes
from posenc.schemes import catalogue

_EAGER, _BOTH = ("eager",), ("eager", "compile")


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

        return Side(call, inputs.tokens())

    return ready


def _gptj_by_transformers(inputs: Inputs) -> Side:
    from transformers.models.gptj import modeling_gptj as gptj

    sizes = inputs.sizes
    sin, cos = gptj.create_sinusoidal_positions(sizes.length, sizes.dim)[None].chunk(2, dim=-1)

    def call(q: Any, k: Any) -> Any:
        return tuple(gptj.apply_rotary_pos_emb(a, sin, cos) for a in (q, k))

    return Side(call, inputs.tokens(BLHD), BLHD)


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
    return Side(lambda q, k: apply(q, k, *rotary(q, at)), inputs.tokens())


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
    return Side(lambda q, k: (rotary(q), rotary(k)), inputs.tokens(BLHD), BLHD)


def _by_rotary_embedding_torch(**options: Callable[[Inputs], Any]) -> Callable[[Inputs], Side]:
    def ready(inputs: Inputs) -> Side:
        from rotary_embedding_torch import RotaryEmbedding

        rotary = RotaryEmbedding(
            inputs.sizes.dim, **{name: value(inputs) for name, value in options.items()}
        )
        if rotary.use_xpos:
            return Side(rotary.rotate_queries_and_keys, inputs.tokens())

        def call(q: Any, k: Any) -> Any:
            return rotary.rotate_queries_or_keys(q), rotary.rotate_queries_or_keys(k)

        return Side(call, inputs.tokens())

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

        return Side(call, inputs.tokens())

    return ready


def _pope_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.x_transformers import PolarEmbedding, apply_polar_pos_emb

    polar = PolarEmbedding(inputs.sizes.dim, inputs.sizes.heads)
    polar.learned_bias = torch.nn.Parameter(inputs.leaf("params.delta").array.detach()[:, None])

    def call(q: Any, k: Any, own: Any) -> Any:
        angles, phases = polar(inputs.positions)
        return apply_polar_pos_emb(q, angles), apply_polar_pos_emb(k, angles + phases)

    return Side(call, {**inputs.tokens(), "params.delta": Leaf(polar.learned_bias, None)})


def _axial_by_rotary_embedding_torch(inputs: Inputs) -> Side:
    from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

    length, dim = inputs.sizes.length, inputs.sizes.dim
    rotary = RotaryEmbedding(dim // 2, theta=inputs.scheme.base)
    at = rotary(inputs.positions.float())  # text: the same coordinate on both axes
    angles = torch.cat([at, at], dim=-1).reshape(length, dim)

    def call(q: Any, k: Any) -> Any:
        return apply_rotary_emb(angles, q), apply_rotary_emb(angles, k)

    return Side(call, inputs.tokens())


def _learned_frequencies_by_rotary_embedding_torch(inputs: Inputs) -> Side:
    from rotary_embedding_torch import RotaryEmbedding

    frequencies = inputs.scheme.frequencies() * np.exp(inputs.host["params.log_scale"])
    rotary = RotaryEmbedding(
        inputs.sizes.dim, custom_freqs=inputs.constant(np.float32(frequencies)), learned_freq=True
    )

    def call(q: Any, k: Any) -> Any:
        return rotary.rotate_queries_or_keys(q), rotary.rotate_queries_or_keys(k)

    return Side(call, inputs.tokens())


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


def peers() -> list[Peer]:
    """Every rotation."""

    def rotation(library: str, scheme: str, call: str, ready: Any, **more: Any) -> Peer:
        more = {"stage": "transform", "modes": _BOTH, "differs": FLOAT32_ANGLES, **more}
        return Peer(library, scheme, call=call, ready=ready, **more)

    inner, eager = {"layout": "interleaved"}, _EAGER
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
    found = [
        rotation(
            "transformers", name, "llama.apply_rotary_pos_emb(q, k, *rotary(q, at))",
            _half_by_transformers(held=False), modes=_BOTH if name == "rope" else eager,
        )
        for name in _written_by_transformers(Sizes(2, 64, 16))
    ]  # fmt: skip
    found += [
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
                 passes=("forward",)),
        rotation(lucid, "axial_rope", "apply_rotary_emb(angles, q)",
                 _axial_by_rotary_embedding_torch, modes=eager),
        rotation(x, "pope", "apply_polar_pos_emb(q, PolarEmbedding(D, H)(at)[0])",
                 _pope_by_x_transformers, modes=eager),
    ]  # fmt: skip
    for stage in ("transform", "rotation"):  # these always have their angles before
        found += [
            rotation("transformers", "rope", "gptj.apply_rotary_pos_emb(q, sin, cos)",
                     _gptj_by_transformers, options=inner, stage=stage),
            rotation("torchtune", "rope", "RotaryPositionalEmbeddings(D, L)(q)",
                     _rotation_by_torchtune, options=inner, stage=stage),
        ]  # fmt: skip
    for name, (of_x, of_lucid) in scaled.items():
        found += [
            rotation(x, name, f"RotaryEmbedding(D, {next(iter(of_x))}=factor)",
                     _by_x_transformers(**of_x), options=inner, modes=eager),
            rotation(lucid, name, f"RotaryEmbedding(D, {next(iter(of_lucid))}=factor)",
                     _by_rotary_embedding_torch(**of_lucid), options=inner, modes=eager),
        ]  # fmt: skip

    def centred(sizes: Sizes) -> dict[str, Any]:
        return {**inner, "center": sizes.length // 2}

    xpos = {"use_xpos": lambda i: True}
    found += [
        rotation(x, "xpos", "RotaryEmbedding(D, use_xpos=True)",
                 _by_x_transformers(**xpos), options=centred, modes=eager),
        rotation(lucid, "xpos", "RotaryEmbedding(D, use_xpos=True).rotate_queries_and_keys(q, k)",
                 _by_rotary_embedding_torch(**xpos), options=centred, modes=eager),
    ]  # fmt: skip
    return found
