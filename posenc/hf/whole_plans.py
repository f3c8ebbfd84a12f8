"""Plans of models that do not rotate, or not all of them."""

from __future__ import annotations

import math

from posenc.contract.checks import check_choice, check_count
from posenc.contract.protocol import PositionScheme
from posenc.hf.layer_schemes import PerLayerT5Bias, inkling_layer
from posenc.hf.layer_types import Config
from posenc.layers import LayerPlan
from posenc.schemes import ALiBi, Learned, NoPE, T5Bias


def falcon_alibi(num_heads: int, head_dim: int) -> ALiBi:
    """ALiBi added before scores are scaled, so its slopes are divided by ``sqrt(D)``."""
    root = math.sqrt(check_count("head_dim", head_dim))
    return ALiBi(num_heads, slopes=[slope / root for slope in ALiBi(num_heads).head_slopes()])


def bloom(part: Config) -> LayerPlan:
    """Released configurations have either name of the number of heads."""
    heads = part["num_attention_heads" if "num_attention_heads" in part else "n_head"]
    return LayerPlan.of(ALiBi(heads), part["n_layer"])


def falcon_rw(part: Config) -> LayerPlan | None:
    """Falcon with ``alibi``; the others rotate."""
    if not part.get("alibi"):
        return None
    heads, width = part["num_attention_heads"], part["hidden_size"]
    return LayerPlan.of(falcon_alibi(heads, width // heads), part["num_hidden_layers"])


def gpt2(part: Config) -> LayerPlan:
    """A table."""
    return LayerPlan.of(Learned(part["n_positions"], part["n_embd"]), part["n_layer"])


def gpt_neo(part: Config) -> LayerPlan:
    """A table; and a window on layers of the type ``local``."""
    kinds = [kind for names, times in part["attention_types"] for kind in list(names) * times]
    windows = tuple(part["window_size"] if kind == "local" else None for kind in kinds)
    table = Learned(part["max_position_embeddings"], part["hidden_size"])
    return LayerPlan((table,) * len(kinds), windows)


def opt(part: Config) -> LayerPlan:
    """A table with two rows before the first."""
    table = Learned(part["max_position_embeddings"], part["hidden_size"], offset=2)
    return LayerPlan.of(table, part["num_hidden_layers"])


def mpt(part: Config) -> LayerPlan:
    """MPT as released: transformers adds ALiBi with a maximum of 8, whatever these keys say."""
    attention, layers = part.get("attn_config", {}), part["n_layers"]
    if attention.get("alibi", True):
        most = float(attention.get("alibi_bias_max", 8))
        return LayerPlan.of(ALiBi(part["n_heads"], max_bias=most), layers)
    if attention.get("rope"):
        raise ValueError("rope in attn_config of 'mpt' is not read here; accepted: alibi")
    if not part.get("learned_pos_emb", True):
        return LayerPlan.of(NoPE(), layers)
    return LayerPlan.of(Learned(part["max_seq_len"], part["d_model"]), layers)


def t5(part: Config) -> LayerPlan:
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


def inkling(part: Config) -> LayerPlan:
    """Inkling 1 and 2, whose layers have names of their own for their types."""
    version2, layers = part.get("model_type") == "inkling2_text", part["num_hidden_layers"]
    near = part.get("local_layer_ids")
    near = [n for n in range(layers) if (n + 1) % 6] if near is None else near
    kinds = part.get("layer_types") or [
        "hybrid_sliding" if n in near else "hybrid" for n in range(layers)
    ]
    window, width, rank = (part[k] for k in ("sliding_window_size", "hidden_size", "d_rel"))
    clip = part.get("rel_l2_clip_threshold", 8.0) if version2 else None
    schemes: dict[str, PositionScheme] = {
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
