"""The plan of a configuration of Hugging Face transformers, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.contract.checks import check_choice, check_count, nearest
from posenc.contract.protocol import PositionScheme
from posenc.hf.config import from_hf, text_part
from posenc.hf.families import FAMILIES, family_of
from posenc.hf.family import Family
from posenc.hf.layer_types import CHUNKED, NEAR, TYPES, Config
from posenc.hf.mrope import mrope_of
from posenc.layers import LayerPlan
from posenc.schemes import Chunk, NoPE, RoPE, Sum


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
        part = whole
        for name in filter(None, text_part(whole)[0].split(".")):
            part = part[name]
        kind, family = str(part.get("model_type")), family_of(part)
        if not family.planned:
            known = [name for name, each in FAMILIES.items() if each.planned]
            raise ValueError(f"model_type {kind!r} is not known here{nearest(kind, known)}")
        if family.plan is not None and (plan := family.plan(part)) is not None:
            return plan
        if part.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise ValueError("use_bidirectional_attention: a plan is of a causal model")
        return _by_layer(part, family)
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing in the configuration of {kind!r}") from None


def _by_layer(part: Config, family: Family) -> LayerPlan:
    assert family.layer_type is not None
    count = part["n_layer" if "n_layer" in part else "num_hidden_layers"]  # GPT-J's name
    layers = range(check_count("num_hidden_layers", count))
    kinds, listed = part.get("layer_types"), part.get("no_rope_layers")
    if kinds and len(kinds) != count:
        raise ValueError(f"layer_types must be num_hidden_layers={count}, got {len(kinds)}")
    if listed and (not isinstance(listed, list | tuple) or len(listed) != count):
        raise ValueError(
            f"no_rope_layers must be a list of num_hidden_layers={count}, got {listed!r}"
        )
    for kind in kinds or ():
        check_choice("type in layer_types", kind, TYPES)
    if not kinds or not family.reads_layer_types:
        kinds = [family.layer_type(part, layer) for layer in layers]
    ropes = from_hf({**part, "layer_types": kinds})
    schemes: list[PositionScheme] = []
    for layer in layers:
        rope = ropes[kinds[layer]] if isinstance(ropes, Mapping) else ropes
        rotates = family.rotates(part, layer, kinds[layer] == NEAR) and isinstance(rope, RoPE)
        schemes.append(_scheme(part, family, rope if rotates else None))
        if kinds[layer] == CHUNKED and part["attention_chunk_size"]:
            schemes[-1] = Sum(schemes[-1], Chunk(part["attention_chunk_size"]))
    windows = [part["sliding_window"] if kinds[layer] == NEAR else None for layer in layers]
    return LayerPlan(tuple(schemes), tuple(windows))


def _scheme(part: Config, family: Family, rope: RoPE | NoPE | None) -> PositionScheme:
    own = rope if isinstance(rope, RoPE) else None
    if family.sections is None:
        return family.scheme(part, own)
    assert own is not None
    given = part.get("rope_parameters") or part.get("rope_scaling") or {}
    return mrope_of(own, {**part, "rope_parameters": {"mrope_section": family.sections, **given}})
