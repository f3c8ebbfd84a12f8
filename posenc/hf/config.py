"""A configuration, whole or in part, and the RoPE of each of its layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from posenc.contract.checks import check_count, check_finite, check_flag, nearest
from posenc.hf import keys
from posenc.hf.families import family_of
from posenc.hf.parameters import Entry, Surroundings, read_parameters
from posenc.schemes.nope import NoPE
from posenc.schemes.rope import RoPE

Config: TypeAlias = Mapping[str, Any]

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "decoder_config")
_WHOLE = {"model_type", "architectures", *keys.WIDTH, *keys.HEADS, *_TEXT}


@dataclass(frozen=True)
class Reading:
    """What a configuration says about rotation.

    Attributes
    ----------
    ropes
        The scheme of each layer type. A configuration that does not distinguish types has one
        entry, named ``""``.
    kept
        Keys that do not concern the frequencies, by their place in the configuration.
    unknown
        Keys that look like RoPE's and that this version does not know, by their place. The value
        ends with the nearest known keys.
    notes
        What was filled in from elsewhere, and where transformers reads something else.
    part
        The part of a multi-modal configuration that was read, as ``text_config``; empty: the whole.
    max_len
        ``max_position_embeddings``.
    """

    ropes: Mapping[str, RoPE | NoPE]
    kept: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    part: str = ""
    max_len: int | None = None


def read(
    config: Any,
    *,
    head_dim: int | None = None,
    max_position_embeddings: int | None = None,
) -> Reading:
    """Read the RoPE of a configuration of transformers 4 or 5, in any of its dialects.

    Parameters
    ----------
    config
        A whole configuration, of transformers or as a dictionary; its
        ``{"rope_theta": ..., "rope_scaling": ...}``; the dictionary ``rope_parameters``; or None
        for a model that does not rotate.
    head_dim, max_position_embeddings
        Instead of what the configuration says.

    Raises
    ------
    TypeError, ValueError
        A value is wrong, a key is missing, or the configuration has no rotary key at all. An
        unknown key is no error here: see ``Reading.unknown``.
    """
    config = as_dictionary(config)
    if config is None:
        return Reading({"": NoPE()})
    if head_dim is not None:
        check_count("head_dim", head_dim)
    part, own = text_part(config)
    own = {**_attention_part(own), **own}
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(own.get(name) or {}, Mapping):
            raise TypeError(f"{name} must be a dictionary or null, got {own[name]!r}")
    whole = bool(_WHOLE & own.keys())
    wrapped = whole or bool({"rope_scaling", "rope_parameters"} & own.keys())
    filled = _with_defaults(own) if whole else dict(own)
    max_len = _first(filled, keys.LENGTH)
    max_len = max_len if max_position_embeddings is None else max_position_embeddings
    if max_len is not None:
        check_count("max_position_embeddings", max_len)
    reader = _Reader(filled if wrapped else {"rope_parameters": filled}, head_dim)
    ropes = reader.ropes(max_len)
    if wrapped:
        reader.look_outside(whole)
    notes = dict.fromkeys([*_notes(config, part, own, filled), *reader.notes])
    return Reading(ropes, reader.kept, reader.unknown, tuple(notes), part, max_len)


def as_dictionary(config: Any) -> Config | None:
    """A configuration of transformers as a dictionary; a dictionary and None as they are."""
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            "a configuration must be one of transformers, a dictionary or None, got "
            f"{type(config).__name__}"
        )
    return given


def from_hf(
    config: Any,
    *,
    head_dim: int | None = None,
    max_position_embeddings: int | None = None,
) -> RoPE | NoPE | dict[str, RoPE | NoPE]:
    """The scheme of ``read``, or one per layer type; unknown keys are a ``ValueError``."""
    reading = read(config, head_dim=head_dim, max_position_embeddings=max_position_embeddings)
    if reading.unknown:
        found = "; ".join(f"{key}{hint}" for key, hint in reading.unknown.items())
        raise ValueError(f"unknown keys: {found}")
    return reading.ropes[""] if "" in reading.ropes else dict(reading.ropes)


class _Reader:
    """Reads a configuration whose RoPE dictionaries are ``rope_parameters`` or ``rope_scaling``."""

    def __init__(self, config: Config, head_dim: int | None) -> None:
        self.config, self.head_dim = config, head_dim
        self.kept, self.unknown, self.notes = dict[str, Any](), dict[str, str](), list[str]()
        self.model, self.family = str(config.get("model_type", "")), family_of(config)
        self.where, self.parameters = self._parameters()

    def _parameters(self) -> tuple[str, Config]:
        """The RoPE dictionary and its name. Both dialects together are read as one."""
        named = {
            name: self.config[name]
            for name in ("rope_parameters", "rope_scaling")
            if self.config.get(name)
        }
        if len(named) < 2:
            return next(iter(named.items()), ("rope_parameters", {}))
        new, old = named.values()
        for key in new.keys() & old.keys():
            if new[key] != old[key]:
                raise ValueError(
                    f"rope_parameters and rope_scaling differ: {key} is {new[key]!r} and "
                    f"{old[key]!r}; drop one"
                )
        if new != old:
            self.notes.append(
                "rope_parameters and rope_scaling are read together; transformers reads "
                "rope_scaling alone"
            )
        return "rope_scaling", {**new, **old}

    def ropes(self, max_len: int | None) -> dict[str, RoPE | NoPE]:
        if "patch_size" in self.config and "vocab_size" not in self.config:
            raise ValueError("patch_size without vocab_size: an image model rotates by coordinates")
        if self.config.get("rotary") is False:
            raise ValueError("rotary is false: the model does not rotate")
        if self.config.get("alibi"):
            raise ValueError("alibi is true: the model adds ALiBi and does not rotate")
        kind = self.config.get("position_embedding_type")
        unrotated = self.family.rotates_if_rope and kind != "rope"
        unread = self.family.ignores_position_type
        unrotated |= self.config.get("use_mem_rope") is False
        unrotated |= self.config.get("mla_use_nope") is True
        if unrotated or kind == "nope":
            return {"": NoPE()}
        if kind is not None and not unread and not str(kind).startswith(("rope", "rotary")):
            raise ValueError(f"position_embedding_type is {kind!r}: the model does not rotate")
        if unread and kind is not None:
            self.notes.append(f"position_embedding_type is {kind!r}, which {self.model} ignores")
        if not self.parameters and not set(keys.ROTARY) & {
            key for key, value in self.config.items() if value is not None
        }:
            given = (str(key) for key, value in self.config.items() if value is not None)
            like = {key for key in given if _LOOKS_ROTARY.search(key)} - keys.KEPT_OUTSIDE.keys()
            told = f"; not understood: {', '.join(sorted(like))}" if like else ""
            raise ValueError(
                f"no rotary key; a model that rotates has one of {_ROTARY_NAMES}{told}"
            )
        self.max_len = max_len
        return self._by_base_of_layers() or {
            kind: self._scheme(kind, given) for kind, given in self._by_type().items()
        }

    def _by_type(self) -> dict[str, Config | None]:
        """The dictionary of each layer type, complete; of ``""`` if there are no types."""
        own = self.parameters
        nested = {key: value for key, value in own.items() if isinstance(value, Mapping)}
        if nested or (own and all(v is None and k not in keys.EVERY for k, v in own.items())):
            unrotated = {k for k, v in own.items() if v is None and k not in keys.EVERY}
            beside = {k: own[k] for k in own.keys() - nested.keys() - unrotated}
            self._beside_types(beside, nested)
            outer, of_yarn = self._outer(), {k: own[k] for k in ("truncate",) if k in own}

            def complete(given: Config) -> Config:
                is_yarn = "yarn" in (given.get("rope_type"), given.get("type"))
                return {**outer, **(of_yarn if is_yarn else {}), **_without_null(given)}

            return {
                kind: None if kind in unrotated else complete(nested[kind])
                for kind in own
                if kind not in beside
            }
        return self._older_types() or {"": self._complete(own)}

    def _beside_types(self, beside: Config, nested: Config) -> None:
        for key in beside:
            if key in ("rope_theta", "rope_type", "type"):
                self.notes.append(f"{key} beside the layer types is not read")
            elif key == "truncate":
                self.notes.append("truncate beside the layer types serves all of type yarn")
            elif key in keys.KEPT:
                self.kept[f"{self.where}.{key}"] = beside[key]
            else:
                self.unknown[f"{self.where}.{key}"] = nearest(key, [*nested, *keys.KEPT])
        if any("truncate" in given for given in nested.values()):
            self.notes.append(
                "transformers 5.23 reads truncate beside the layer types only, not within them"
            )

    def _older_types(self) -> dict[str, Config | None]:
        """Two bases for two layer types, as before transformers 5; empty for one base."""
        config, outer, own = self.config, self._outer(), _without_null(self.parameters)
        local = _first(config, ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta"))
        if local is None and not self.family.scales_full_layers:
            return {}
        base = config.get("global_rope_theta", outer.get("rope_theta"))
        sliding = {"rope_theta": base if local is None else local}
        both = own if "global_rope_theta" in config else {}  # ModernBERT scales both types
        return {
            "full_attention": {**outer, "rope_theta": base, **own},
            "sliding_attention": {**outer, **both, **sliding},
        }

    def _by_base_of_layers(self) -> dict[str, RoPE | NoPE]:
        """One scheme per base in ``layer_rope_theta``; empty without that list."""
        bases = self.config.get("layer_rope_theta")
        if not bases:
            return {}
        if not isinstance(bases, list | tuple):
            raise TypeError(f"layer_rope_theta must be a list, got {bases!r}")
        for base in bases:
            check_finite("layer_rope_theta", base)
        own = self._complete(self.parameters)
        schemes = {
            base: self._scheme("", {**own, "rope_theta": base} if base else None)
            for base in dict.fromkeys(bases)
        }
        alone = len(schemes) == 1
        return {"" if alone else f"layer_rope_theta={base:g}": schemes[base] for base in schemes}

    def _outer(self) -> dict[str, Any]:
        """Keys outside of the dictionary, by the names that they have inside."""
        config = self.config
        outer = {
            "rope_theta": _first(config, ("rope_theta", "rotary_emb_base")),
            "partial_rotary_factor": _first(config, ("partial_rotary_factor", "rotary_pct")),
            "rotary_dim": config.get("rotary_dim"),
        }
        return {key: value for key, value in outer.items() if value is not None}

    def _complete(self, given: Config) -> Config:
        """A dictionary with what is outside of it; what is inside has priority."""
        outer, given = self._outer(), _without_null(given)
        for key in sorted(outer.keys() & given.keys()):
            if given[key] != outer[key]:
                inside = f"{given[key]!r} in {self.where}"
                self.notes.append(
                    f"{key} is {inside}, which has priority, and {outer[key]!r} outside"
                )
        return {**outer, **given}

    def _scheme(self, kind: str, given: Config | None) -> RoPE | NoPE:
        if given is None:
            return NoPE()
        where = f"{self.where}[{kind!r}]" if kind else self.where
        entry = self._entry(given, where, kind)
        place = f"{self.where}.{kind}" if kind else self.where
        self.kept |= {f"{place}.{key}": value for key, value in entry.kept.items()}
        for key in entry.unknown:
            self.unknown[f"{place}.{key}"] = nearest(key, entry.accepted)
        self.notes += [f"{kind}: {note}" if kind else note for note in entry.notes]
        return entry.rope

    def _entry(self, given: Config, where: str, kind: str) -> Entry:
        config = self.config
        given_layout = config.get("rope_interleave", self.family.interleaved)
        interleaved = check_flag("rope_interleave", given_layout)
        # transformers reads no length outside, where each layer type has a dictionary of its own.
        by_type = any(isinstance(value, Mapping) for value in self.parameters.values())
        around = Surroundings(
            where=where,
            head_dim=self.head_dim or self._own_head_dim(kind),
            max_len=self.max_len,
            original_len=None if by_type else config.get("original_max_position_embeddings"),
            layout="interleaved" if interleaved else "half",
            softmax=self.family.scaled_softmax,
            long=self.family.yarn_is_longrope,
        )
        rotary = config.get("qk_rope_head_dim")
        if self.head_dim is None and rotary is not None:
            given = self._only_rotary(given, config.get("head_dim"), rotary)
            around = replace(around, head_dim=rotary)
        return read_parameters(given, around)

    def _only_rotary(self, given: Config, head_dim: int | None, rotary: int) -> Config:
        """Without the part that rotates, where the rotated channels are a vector of their own."""
        part = given.get("partial_rotary_factor")
        if part is None or int((head_dim or rotary) * part) != rotary:
            return given
        return {key: value for key, value in given.items() if key != "partial_rotary_factor"}

    def _own_head_dim(self, kind: str) -> int | None:
        """Channels per head in layers of one type, as the configuration says."""
        config, types = self.config, self.config.get("layer_types") or ()
        by_layer = config.get("per_layer_config") or {}
        if not isinstance(types, list | tuple):
            raise TypeError(f"layer_types must be a list, got {types!r}")
        if not isinstance(by_layer, Mapping) or not all(
            str(layer).isdecimal() and isinstance(own, Mapping) for layer, own in by_layer.items()
        ):
            raise TypeError(
                "per_layer_config must be a dictionary of dictionaries by the number of the layer, "
                f"got {by_layer!r}"
            )
        for layer, own in by_layer.items():
            if own.get("head_dim") and int(layer) < len(types) and types[int(layer)] == kind:
                return check_count("head_dim", own["head_dim"])
        names = ("global_head_dim",) if kind == "full_attention" else ()
        given = _first(config, (*names, *keys.HEAD_DIM))
        width, heads = _first(config, keys.WIDTH), _first(config, keys.HEADS)
        if given is not None or width is None or heads is None:
            return None if given is None else check_count("head_dim", given)
        return check_count("hidden_size", width) // check_count("num_attention_heads", heads)

    def look_outside(self, whole: bool) -> None:
        """Sort the keys outside of the dictionaries: kept, unknown, or not RoPE's at all."""
        names = {*keys.ROTARY, *keys.LENGTH, *keys.HEAD_DIM, "original_max_position_embeddings"}
        for key, value in self.config.items():
            if key in keys.KEPT_OUTSIDE or key in keys.KEPT:
                if value is not None and key not in names - {"qk_rope_head_dim"}:
                    self.kept[key] = value
            elif key not in names and (not whole or _LOOKS_ROTARY.search(str(key))):
                self.unknown[key] = nearest(key, keys.ROTARY)


_LOOKS_ROTARY = re.compile(r"(^|_)(rope|rotary|rotates?|yarn|ntk|mrope|theta)(_|$)|_rope$|rotary")
_ROTARY_NAMES = ", ".join(keys.ROTARY)


def text_part(config: Config) -> tuple[str, Config]:
    """The part of a multi-modal configuration that describes the language model, and its name."""
    path: list[str] = []
    while inner := next((n for n in _TEXT if isinstance(config.get(n), Mapping)), None):
        part, beside = config[inner], {k: v for k, v in config.items() if k not in _TEXT}
        # Older multi-modal configurations have the rotary keys of the text model beside it.
        own = set(keys.ROTARY) & part.keys() or not set(keys.ROTARY) & beside.keys()
        path, config = [*path, inner], part if own else {**beside, **part}
    return ".".join(path), config


def _notes(config: Config, part: str, own: Config, filled: Config) -> list[str]:
    """What is not in the schemes: other parts that rotate, keys filled in, the other direction."""
    model = str(filled.get("model_type", ""))
    others = [
        name
        for name, value in config.items()
        if part and isinstance(value, Mapping) and name != part.partition(".")[0]
        if set(keys.ROTARY) & value.keys()
    ]
    notes = [f"{name} has rotary keys of its own, which are not read" for name in others]
    notes += [
        f"{key} is missing: {value!r}, the default of {model!r}"
        for key, value in filled.items()
        if value is not own.get(key)
    ]
    if family_of(filled).turns_back:
        notes.append(
            f"{model} rotates the other way: swap the halves of each head's rows in the weights of "
            "its query and key projections"
        )
    return notes


def _attention_part(config: Config) -> dict[str, Any]:
    """Keys that DBRX and MPT have in a part of their own."""
    own = config.get("attn_config")
    part = own if isinstance(own, Mapping) else {}
    names = ("alibi",) if part.get("rope") is False else ("rope_theta", "alibi")
    return {key: part[key] for key in names if key in part}


def _with_defaults(config: Config) -> dict[str, Any]:
    """With what released configurations of this ``model_type`` leave out."""
    family = family_of(config)
    defaults = dict(family.defaults)
    if family.part is not None:
        defaults["partial_rotary_factor"] = family.part
    named = set(keys.HEAD_DIM) - {"qk_rope_head_dim"}
    if family.head_dim is not None and not named & config.keys():  # null is a width, too
        defaults["head_dim"] = family.head_dim
    inside = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = {key for key, value in {**inside, **config}.items() if value is not None}
    if any(isinstance(value, Mapping) for value in inside.values()):
        given |= set(keys.ROTARY)
    if given & {"rope_theta", "rotary_emb_base"} and "rope_local_base_freq" not in defaults:
        given |= {"rope_theta", "rotary_emb_base"}
    if given & {"partial_rotary_factor", "rotary_pct", "rotary_dim"}:
        given |= {"partial_rotary_factor", "rotary_pct", "rotary_dim"}
    return {**config, **{key: value for key, value in defaults.items() if key not in given}}


def _without_null(given: Config) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _first(config: Config, names: tuple[str, ...]) -> Any:
    """The value of the first of these keys that the configuration has."""
    return next((config[name] for name in names if config.get(name) is not None), None)
