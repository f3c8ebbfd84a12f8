"""The keys of RoPE dictionaries in configurations of transformers 4 and 5, and what each is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """The keys of one ``rope_type``, beside those of every type."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


KINDS = {
    "default": Kind(),
    "linear": Kind(("factor",)),
    "dynamic": Kind(("factor",), ("alpha", "original_max_position_embeddings")),
    "yarn": Kind(
        ("original_max_position_embeddings", "factor"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": Kind(
        ("short_factor", "long_factor", "original_max_position_embeddings", "factor"),
        ("attention_factor", "short_mscale", "long_mscale"),
    ),
    "llama3": Kind(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
    "proportional": Kind((), ("factor",)),
}
"""A needed length or factor may follow from the rest of the configuration."""

EVERY = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "rotary_dim")
"""Keys of every type."""

ALIASES = {"mrope": "default", "su": "longrope", "xdrope": "dynamic"}
"""Older names of types."""

KEPT = {
    "mrope_section": "M-RoPE: how many frequencies each axis has",
    "mrope_interleaved": "M-RoPE: the axes take turns",
    "interleaved": "M-RoPE: the axes take turns",
    "xdrope_section": "M-RoPE of Hunyuan: how many channels each axis has",
    "llama_4_scaling_beta": "queries grow with the logarithm of their position",
    "max_position_embeddings": "a copy of the configuration's length",
    "finetuned": "a remark of its author",
}
"""Keys of these dictionaries that do not concern the frequencies."""

WITH_ALPHA = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Hunyuan's dictionaries have these beside ``alpha``, and no released code reads them."""

HEAD_DIM = ("qk_rope_head_dim", "head_dim", "attention_head_dim", "kv_channels")
"""Names of the width of a head in configurations, the first one that is present."""

WIDTH = ("hidden_size", "n_embd", "d_model")
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_num_attention_heads",
)  # fmt: skip
LENGTH = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
)  # fmt: skip

ROTARY = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_dim",
    "rotary_pct", "rotary_emb_base", "rope_local_base_freq", "global_rope_theta",
    "local_rope_theta", "swa_rope_theta", "layer_rope_theta",
)  # fmt: skip
"""Keys of a configuration, outside of its RoPE dictionary, from which frequencies follow."""

KEPT_OUTSIDE = {
    "no_rope_layers": "which layers rotate: 1 means that the layer does",
    "no_rope_layer_interval": "every so many-th layer does not rotate",
    "rope_scaling_layers": "the layers that the scaling serves",
    "rope_interleave": "layout of the weights",
    "qk_rope_head_dim": "the rotated channels of a head, apart from the others",
    "qk_nope_head_dim": "the other channels of a head",
    "position_embedding_type": "whether the model rotates at all",
    "alibi": "whether the model adds ALiBi instead",
    "compress_rope_theta": "the base of compressed layers, which rope_parameters repeats",
    "rotary": "whether the model rotates at all",
    "use_mrope": "M-RoPE: whether places have several axes",
    "mla_use_nope": "whether the model rotates at all",
    "use_mem_rope": "whether the model rotates at all",
    "num_position_embeddings": "a table of positions",
    "position_embedding_size": "a table of positions",
    "max_2d_position_embeddings": "a table of positions",
    "dropout_positions": "dropout",
}
"""Keys of a configuration that speak of rotation or positions, and not of frequencies."""
