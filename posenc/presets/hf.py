"""The plan of a configuration of Hugging Face transformers, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from posenc.contract.checks import check_choice, check_count, nearest
from posenc.contract.protocol import PositionScheme
from posenc.hf import from_hf, read
from posenc.hf.mrope import mrope_of
from posenc.layers import LayerPlan
from posenc.presets import uniform
from posenc.presets.plans import PerLayerLearnedRoPE, PerLayerT5Bias, inkling_layer
from posenc.schemes import Chunk, Learned, LogScale, NoPE, RoPE, Sink, Sum, T5Bias

Config = Mapping[str, Any]
_NEAR, _CHUNKED, _FULL = "sliding_attention", "chunked_attention", "full_attention"
_TYPES = (_NEAR, _CHUNKED, _FULL, "indexed_attention")


def from_hf_config(config: Any) -> LayerPlan:
    """The plan that transformers 5.23 computes from a configuration.

    Parameters
    ----------
    config
        A whole configuration of a model that is known here, multi-modal or of text alone: an object
        of transformers, or the dictionary of its ``config.json``.

    Returns
    -------
    Scheme and window of each layer. T5's are those of the encoder, then those of the decoder; its
    cross attention has no positions. Norms of queries and keys, the softmax scale without YaRN's
    factor, and the sparse attention of Mistral Large 4 are the model's; see also
    ``mistral_large4``. Keys of MPT that transformers ignores (``alibi``, ``alibi_bias_max``,
    ``learned_pos_emb``) are read. The mask by which tokens of one image see each other is the
    model's (Gemma).

    Raises
    ------
    TypeError, ValueError
        The ``model_type`` is not known, a key is missing or wrong, or a key about rotation is
        unknown.
    """
    whole = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(whole, Mapping):
        raise TypeError(f"config must be a configuration or its dictionary, got {config!r}")
    kind = str(whole.get("model_type"))
    try:
        if kind in _WITHOUT_ROTATION:
            return _WITHOUT_ROTATION[kind](whole)
        part = whole
        for name in filter(None, read(whole).part.split(".")):
            part = part[name]
        kind = str(part.get("model_type"))
        if kind not in _FAMILIES:
            known = [*_FAMILIES, *_WITHOUT_ROTATION]
            raise ValueError(f"model_type {kind!r} is not known here{nearest(kind, known)}")
        if part.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise ValueError("use_bidirectional_attention: a plan is of a causal model")
        return _plan(part, _FAMILIES[kind])
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing in the configuration of {kind!r}") from None


def _plan(part: Config, family: _Family) -> LayerPlan:
    count = part["n_layer" if "n_layer" in part else "num_hidden_layers"]  # GPT-J's name
    layers = range(check_count("num_hidden_layers", count))
    usual = [family.kind(part, layer) for layer in layers] if not family.typed else None
    kinds = part.get("layer_types") or usual or [family.kind(part, layer) for layer in layers]
    if len(kinds) != len(layers):
        raise ValueError(f"layer_types must be num_hidden_layers={len(layers)}, got {len(kinds)}")
    listed = part.get("no_rope_layers")
    if listed and (not isinstance(listed, list | tuple) or len(listed) != len(layers)):
        raise ValueError(
            f"no_rope_layers must be a list of num_hidden_layers={len(layers)}, got {listed!r}"
        )
    for kind in kinds:
        check_choice("type in layer_types", kind, _TYPES)
    kinds = usual or kinds
    ropes = from_hf({**part, "layer_types": kinds})
    schemes: list[PositionScheme] = []
    for layer in layers:
        own = ropes[kinds[layer]] if isinstance(ropes, Mapping) else ropes
        rotates = family.rotates(part, layer, kinds[layer] == _NEAR)
        schemes.append(family.scheme(part, _rope(own) if rotates else None))
        if kinds[layer] == _CHUNKED and part["attention_chunk_size"]:
            schemes[-1] = Sum(schemes[-1], Chunk(part["attention_chunk_size"]))
    windows = [part["sliding_window"] if kinds[layer] == _NEAR else None for layer in layers]
    return LayerPlan(tuple(schemes), tuple(windows))


def _rope(scheme: RoPE | NoPE) -> RoPE | None:
    return scheme if isinstance(scheme, RoPE) else None


def _by_pattern(default: int) -> Callable[[Config, int], str]:
    """Types of layers where a configuration has none: every so many-th layer is full."""

    def kind(part: Config, layer: int) -> str:
        pattern = part.get("sliding_window_pattern") or default
        if isinstance(pattern, str):
            full = pattern[layer % len(pattern)] == "G"
        else:
            full = (layer + 1) % pattern == 0
        return _FULL if full or not part["sliding_window"] else _NEAR

    return kind


def _gemma4(part: Config, layer: int) -> str:
    """Gemma 4: every sixth layer is full, and the last in any case."""
    last = layer == part["num_hidden_layers"] - 1
    return _FULL if last else _by_pattern(6)(part, layer)


def _all_alike(part: Config, layer: int) -> str:
    return _NEAR if part["sliding_window"] else _FULL


def _all_if_used(part: Config, layer: int) -> str:
    return _NEAR if part.get("use_sliding_window") and part.get("sliding_window") else _FULL


def _in_later_layers(part: Config, layer: int) -> str:
    """Qwen: layers from ``max_window_layers`` on have a window."""
    uses = part.get("use_sliding_window") and part.get("sliding_window")
    return _NEAR if uses and layer >= part["max_window_layers"] else _FULL


def _in_early_even_layers(part: Config, layer: int) -> str:
    """Qwen 2 MoE: every other layer below ``max_window_layers`` has a window."""
    uses = part.get("use_sliding_window") and part.get("sliding_window")
    return _NEAR if uses and layer % 2 == 0 and layer < part["max_window_layers"] else _FULL


def _where_not_rotating(part: Config, layer: int) -> str:
    """SmolLM3: NoPE layers have the window, if there is one."""
    uses = part.get("use_sliding_window") and part.get("sliding_window")
    return _NEAR if uses and not _listed(part, layer, False) else _FULL


def _where_rotating(part: Config, layer: int) -> str:
    """Llama 4: layers with RoPE have chunks."""
    return _CHUNKED if _listed(part, layer, False) else _FULL


def _never(part: Config, layer: int) -> str:
    return _FULL


def _always(part: Config, layer: int, near: bool) -> bool:
    return True


def _near(part: Config, layer: int, near: bool) -> bool:
    """Cohere 2: RoPE is on layers with a window, and without one nowhere."""
    return near and bool(part["sliding_window"])


def _near_if_any(part: Config, layer: int, near: bool) -> bool:
    """EXAONE 4: RoPE is on layers with a window, and without one everywhere."""
    return near or not part["sliding_window"]


def _listed(part: Config, layer: int, near: bool) -> bool:
    """``no_rope_layers`` has 1 where a layer rotates."""
    given = part.get("no_rope_layers")
    return bool(given[layer]) if given else (layer + 1) % part.get("no_rope_layer_interval", 4) != 0


def _plain(part: Config, rope: RoPE | None) -> PositionScheme:
    return NoPE() if rope is None else rope


def _with_sink(part: Config, rope: RoPE | None) -> PositionScheme:
    return Sink(_plain(part, rope), part["num_attention_heads"])


def _llama4(part: Config, rope: RoPE | None) -> PositionScheme:
    if rope is not None or not part.get("attn_temperature_tuning", True):
        return _plain(part, rope)
    period, beta = part.get("floor_scale", 8192), part.get("attn_scale", 0.1)
    return LogScale("llama4", train_len=period, beta=beta)


def _ministral3(part: Config, rope: RoPE | None) -> PositionScheme:
    given = part["rope_parameters"]
    period, beta = given["original_max_position_embeddings"], given["llama_4_scaling_beta"]
    return Sum(_plain(part, rope), LogScale("ministral3", train_len=period, beta=beta))


def _latent(part: Config, rope: RoPE | None) -> RoPE:
    """Heads of latent attention: the channels that rotate, and others."""
    turning = part["qk_rope_head_dim"]
    assert rope is not None
    layout = "half" if part.get("rope_interleave") is False else rope.layout
    width = turning + part["qk_nope_head_dim"]
    return replace(rope, head_dim=width, rotary_dim=turning, layout=layout)


def _mistral4(part: Config, rope: RoPE | None) -> PositionScheme:
    return _ministral3(part, _latent(part, rope))


def _mrope(*usual: int) -> Callable[[Config, RoPE | None], PositionScheme]:
    """M-RoPE; ``usual`` are the sections where a configuration has none."""

    def scheme(part: Config, rope: RoPE | None) -> PositionScheme:
        assert rope is not None
        given = part.get("rope_parameters") or part.get("rope_scaling") or {}
        return mrope_of(rope, {**part, "rope_parameters": {"mrope_section": usual, **given}})

    return scheme


def _bloom(part: Config) -> LayerPlan:
    """Released configurations have either name of the number of heads."""
    heads = part["num_attention_heads" if "num_attention_heads" in part else "n_head"]
    return LayerPlan.of(uniform.bloom(num_heads=heads), part["n_layer"])


def _falcon(part: Config) -> LayerPlan:
    if not part.get("alibi"):
        return _plan(part, _Family(_never))
    heads, width = part["num_attention_heads"], part["hidden_size"]
    scheme = uniform.falcon_rw(num_heads=heads, head_dim=width // heads)
    return LayerPlan.of(scheme, part["num_hidden_layers"])


def _gpt_neo(part: Config) -> LayerPlan:
    """The table; and a window on layers of the type ``local``."""
    kinds = [kind for names, times in part["attention_types"] for kind in list(names) * times]
    windows = tuple(part["window_size"] if kind == "local" else None for kind in kinds)
    table = Learned(part["max_position_embeddings"], part["hidden_size"])
    return LayerPlan((table,) * len(kinds), windows)


def _mpt(part: Config) -> LayerPlan:
    """MPT as released: transformers adds ALiBi with a maximum of 8, whatever these keys say."""
    attention, layers = part.get("attn_config", {}), part["n_layers"]
    if attention.get("alibi", True):
        most = float(attention.get("alibi_bias_max", 8))
        return LayerPlan.of(uniform.mpt(num_heads=part["n_heads"], max_bias=most), layers)
    if attention.get("rope"):
        raise ValueError("rope in attn_config of 'mpt' is not read here; accepted: alibi")
    if not part.get("learned_pos_emb", True):
        return LayerPlan.of(NoPE(), layers)
    return LayerPlan.of(Learned(part["max_seq_len"], part["d_model"]), layers)


def _t5(part: Config) -> LayerPlan:
    """The layers of the encoder, then those of the decoder; or those of the one stack there is."""

    def stack(layers: int, causal: bool) -> LayerPlan:
        scheme = kind(
            part["num_heads"],
            part.get("relative_attention_num_buckets", 32),
            part.get("relative_attention_max_distance", 128),
            causal=causal,
            scaled=False,
        )
        return LayerPlan.of(scheme, layers)

    kind = PerLayerT5Bias if part["model_type"] == "umt5" else T5Bias
    layers, later = part["num_layers"], part.get("num_decoder_layers")
    if not part.get("is_encoder_decoder", True):
        return stack(layers, bool(part.get("is_decoder")))
    decoder = stack(layers if later is None else later, True)
    return LayerPlan(stack(layers, False).schemes + decoder.schemes)


def _inkling(part: Config) -> LayerPlan:
    version2, layers = part.get("model_type") == "inkling2_text", part["num_hidden_layers"]
    near = part.get("local_layer_ids")
    near = [n for n in range(layers) if (n + 1) % 6] if near is None else near
    kinds = part.get("layer_types") or [
        "hybrid_sliding" if n in near else "hybrid" for n in range(layers)
    ]
    window, width, rank = (part[k] for k in ("sliding_window_size", "hidden_size", "d_rel"))
    clip = part.get("rel_l2_clip_threshold", 8.0) if version2 else None
    schemes = {
        "hybrid_sliding": inkling_layer(
            part["swa_num_attention_heads"], width, rank, window, clip=clip
        ),
        "hybrid": inkling_layer(
            part["num_attention_heads"], width, rank, part["rel_extent"], clip=clip,
            length=part.get("log_scaling_n_floor", 128_000 if version2 else None),
            beta=part.get("log_scaling_alpha", 0.1),
        ),
    }  # fmt: skip
    for kind in kinds:
        check_choice("type in layer_types", kind, tuple(schemes))
    windows = (window if kind == "hybrid_sliding" else None for kind in kinds)
    return LayerPlan(tuple(schemes[kind] for kind in kinds), tuple(windows))


def _mistral_large4(part: Config, rope: RoPE | None) -> PositionScheme:
    scale = LogScale("mistral_large4", num_heads=part["num_attention_heads"])
    if rope is None:
        return scale
    turning = part["qk_rope_head_dim"]
    given = {field.name: getattr(rope, field.name) for field in fields(rope) if field.init}
    whole = {"head_dim": turning + part["qk_nope_head_dim"], "rotary_dim": turning}
    return Sum(PerLayerLearnedRoPE(**{**given, **whole}), scale)


@dataclass(frozen=True)
class _Family:
    """What one ``model_type`` does.

    Attributes
    ----------
    kind
        The type of a layer, where ``layer_types`` is missing.
    rotates
        Whether a layer rotates, from its index and whether it has a window.
    scheme
        The scheme of a layer, from its RoPE, or None if it does not rotate.
    """

    kind: Callable[[Config, int], str]
    rotates: Callable[[Config, int, bool], bool] = _always
    scheme: Callable[[Config, RoPE | None], PositionScheme] = _plain

    @property
    def typed(self) -> bool:
        """Whether the class of transformers reads ``layer_types``; else all layers are alike."""
        return self.kind not in (_all_alike, _all_if_used, _never)


_QWEN2_VL = _Family(_in_later_layers, scheme=_mrope(16, 24, 24))
_QWEN3_VL = _Family(_never, scheme=_mrope(24, 20, 20))
_FULL_AND_ROTATING = (
    "apertus", "arcee", "bitnet", "codegen", "cohere", "ernie4_5", "ernie4_5_moe", "flex_olmo",
    "gemma", "glm", "glm4", "glm4_moe", "gpt_neox", "gptj", "granite", "granitemoe", "helium",
    "internlm3", "jais2", "llama", "minimax_m2", "nemotron", "olmo", "olmo2", "olmoe",
    "persimmon", "phi", "seed_oss", "solar_open", "stablelm",
)  # fmt: skip
"""Models that rotate on every layer, all of which see every key."""

_FAMILIES = {
    **{kind: _Family(_never) for kind in _FULL_AND_ROTATING},
    "cohere2": _Family(_by_pattern(4), _near),
    "cohere2_moe": _Family(_by_pattern(4), _near),
    "deepseek_v2": _Family(_never, scheme=_latent),
    "deepseek_v3": _Family(_never, scheme=_latent),
    "ernie4_5_vl_moe_text": _Family(_never, scheme=_mrope(22, 22, 20)),
    "exaone4": _Family(_by_pattern(4), _near_if_any),
    "exaone_moe": _Family(_by_pattern(4), _near_if_any),
    "gemma2": _Family(_by_pattern(2)),
    "gemma3_text": _Family(_by_pattern(6)),
    "gemma4_text": _Family(_gemma4),
    "gemma4_unified_text": _Family(_gemma4),
    "glm4_moe_lite": _Family(_never, scheme=_latent),
    "glm4v_moe_text": _Family(_never, scheme=_mrope(8, 12, 12)),
    "glm4v_text": _Family(_never, scheme=_mrope(8, 12, 12)),
    "gpt_oss": _Family(_by_pattern(2), scheme=_with_sink),
    "kolibri1": _Family(_by_pattern(5), _near_if_any),
    "llama4_text": _Family(_where_rotating, _listed, _llama4),
    "ministral3": _Family(_all_alike, scheme=_ministral3),
    "minicpm3": _Family(_never, scheme=_latent),
    "mistral": _Family(_all_alike),
    "mistral4": _Family(_never, scheme=_mistral4),
    "mistral_large4_text": _Family(_never, _listed, _mistral_large4),
    "mixtral": _Family(_all_alike),
    "olmo3": _Family(_by_pattern(4)),
    "phi3": _Family(_all_alike),
    "phimoe": _Family(_all_alike),
    "qwen2": _Family(_in_later_layers),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl": _QWEN2_VL,  # older configurations hold those of text themselves
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_moe": _Family(_in_early_even_layers),
    "qwen3": _Family(_in_later_layers),
    "qwen3_moe": _Family(_all_if_used),
    "qwen3_vl_moe_text": _QWEN3_VL,
    "qwen3_vl_text": _QWEN3_VL,
    "smollm3": _Family(_where_not_rotating, _listed),
    "starcoder2": _Family(_all_alike),
    "vaultgemma": _Family(_by_pattern(2)),
    "youtu": _Family(_never, scheme=_latent),
}

_WITHOUT_ROTATION: Mapping[str, Callable[[Config], LayerPlan]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gpt2": lambda c: LayerPlan.of(Learned(c["n_positions"], c["n_embd"]), c["n_layer"]),
    "gpt_neo": _gpt_neo,
    "inkling2": lambda c: _inkling(c["text_config"]),
    "inkling2_text": _inkling,
    "inkling_mm_model": lambda c: _inkling(c["text_config"]),
    "inkling_text": _inkling,
    "mpt": _mpt,
    "mt5": _t5,
    "opt": lambda c: LayerPlan.of(
        Learned(c["max_position_embeddings"], c["hidden_size"], offset=2), c["num_hidden_layers"]
    ),
    "t5": _t5,
    "umt5": _t5,
}
"""Models of which all or some add a bias or an embedding."""
