"""transformers as a reader of configurations: what its own modules compute from one.

Nothing is taken from a table. The model is built without weights (on the device ``meta``), its
rotary module alone on the CPU. What the attention module does with the angles is found in its code:
which function rotates, under which conditions of the module (``rotation_of``). That function is
run on unit vectors, so pairs, directions, factors and axes are those of the code that a model runs.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from posenc.audit.readers import Facts, NotReadError, Said, Unsaid
from posenc_torch.audit.attention_code import Unclear, keyword_of, rotation_of
from posenc_torch.audit.turns import Turns

_PLAIN = ("rope_theta", "partial_rotary_factor")


class Transformers:
    """The installed transformers."""

    name = "transformers"

    def __init__(self) -> None:
        import transformers

        self.version: str = transformers.__version__

    def read(self, config: Mapping[str, Any], lengths: Sequence[int]) -> list[Facts]:
        """As ``Reader.read``: one entry for the layers whose facts are equal."""
        with _quiet():
            built = _built(config, self.version)
            found: dict[Any, tuple[Facts, list[int]]] = {}
            for layer, attention in enumerate(built.attentions):
                facts = _facts(built, layer, attention, lengths)
                found.setdefault(_key(facts), (facts, []))[1].append(layer)
        return [replace(facts, layers=tuple(layers)) for facts, layers in found.values()]


@dataclass
class _Built:
    """A model without weights, and its parts.

    Attributes
    ----------
    config
        That of the text.
    attentions
        The attention module of each layer.
    rotary
        On the CPU, the rotary module of each layer; None: it has none.
    turns
        What was measured, by rotary module, function that rotates and type of the layer.
    """

    config: Any
    attentions: list[Any]
    rotary: list[Any]
    turns: dict[Any, Said[Turns]]


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of transformers: what they say of a configuration is measured here."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def _built(config: Mapping[str, Any], version: str) -> _Built:
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise NotReadError(f"transformers {version} has no model_type {kind!r}")
    text = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(config))).get_text_config()
    with torch.device("meta"):
        model = _model_class(text)(copy.deepcopy(text))
    named = _attentions(model)
    if not named:
        raise NotReadError(f"no attention modules with an index are found in {_name(model)}")
    on_cpu: dict[int, Any] = {}
    rotary: list[Any] = []
    for name, _ in named:
        one = _rotary_of(model, name)
        if one is not None and id(one) not in on_cpu:
            on_cpu[id(one)] = type(one)(getattr(one, "config", text))
        rotary.append(None if one is None else on_cpu[id(one)])
    return _Built(text, [attention for _, attention in named], rotary, {})


def _name(module: Any) -> str:
    return type(module).__name__


def _rotary_of(model: nn.Module, name: str) -> Any:
    """The rotary module that is nearest above an attention module; None: there is none."""
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        owner: Any = model.get_submodule(".".join(parts[:depth]))
        found = {
            id(child): child
            for child_name, child in owner.named_children()
            if child_name.endswith(("rotary_emb", "rotary_embeddings"))
        }
        if len(found) > 1:
            names = ", ".join(_name(each) for each in found.values())
            raise NotReadError(f"{_name(owner)} has several rotary modules: {names}")
        if found:
            return next(iter(found.values()))
    return None


def _model_class(text: Any) -> Any:
    """The class of the language model of a configuration of text."""
    import importlib

    from transformers import MODEL_MAPPING, PreTrainedModel

    if type(text) in MODEL_MAPPING:
        found = MODEL_MAPPING[type(text)]
        return found[0] if isinstance(found, tuple) else found
    name = type(text).__module__.replace(".configuration_", ".modeling_")
    fitting = [
        each
        for each in vars(importlib.import_module(name)).values()
        if isinstance(each, type) and issubclass(each, PreTrainedModel)
        if each.__init__.__annotations__.get("config") in (type(text), type(text).__name__)
    ]
    models = [each for each in fitting if each.__name__.endswith("Model")] or fitting
    models = [each for each in models if "PreTrained" not in each.__name__]
    if not models:
        raise NotReadError(f"no model of transformers takes a {type(text).__name__}")
    return models[0]


def _attentions(model: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of the attention of each layer: the first in it that knows its index."""
    found: dict[int, tuple[str, Any]] = {}
    stacks: set[str] = set()
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        other = any(word in name.lower() for word in ("cross", "encdec", "indexer"))
        if isinstance(index, int) and "Attention" in _name(module) and not other:
            found.setdefault(index, (name, module))
            stacks.add(name.partition(f".{index}.")[0])
    if len(stacks) > 1:
        raise NotReadError(f"the model has several stacks of layers: {', '.join(sorted(stacks))}")
    return [found[index] for index in sorted(found)]


def _facts(built: _Built, layer: int, attention: Any, lengths: Sequence[int]) -> Facts:
    facts = Facts(
        kind=_kind(built.config, layer, attention),
        softmax_factor=_softmax_factor(attention, built.config),
        window=_window(attention, built.config),
    )
    rotary = built.rotary[layer]
    try:
        rotate = rotation_of(attention)
    except Unclear as error:
        return _unknown(facts, str(error))
    if rotate is None or rotary is None:
        if rotate is not None:
            return _unknown(facts, f"{_name(attention)} makes its angles by itself")
        nothing = Unsaid("these layers do not rotate")
        return replace(
            facts, frequencies=dict.fromkeys(lengths, ()), layout=nothing, rotary_dim=0,
            attention_factor=nothing, softmax_factor=nothing, sections=None,
        )  # fmt: skip
    key = id(rotary), rotate, facts.kind
    if key not in built.turns:
        built.turns[key] = _measured(rotary, rotate, facts.kind, lengths)
    turns = built.turns[key]
    if isinstance(turns, Unsaid):
        return _unknown(facts, turns.reason)
    return replace(
        facts,
        frequencies=turns.frequencies,
        layout=turns.layout,
        rotary_dim=turns.rotary_dim,
        attention_factor=turns.factor,
        sections=turns.sections,
    )


def _measured(rotary: Any, rotate: Any, kind: str, lengths: Sequence[int]) -> Said[Turns]:
    try:
        return Turns.measure(rotary, rotate, kind, lengths)
    except Unclear as error:
        return Unsaid(str(error))


def _unknown(facts: Facts, reason: str) -> Facts:
    why = Unsaid(reason)
    return replace(
        facts, frequencies=why, layout=why, rotary_dim=why, attention_factor=why, sections=why
    )


def _kind(config: Any, layer: int, attention: Any) -> str:
    own = getattr(attention, "layer_type", None) or getattr(attention, "attention_type", None)
    given = getattr(config, "layer_types", None)
    return str(own or (given[layer] if given and layer < len(given) else ""))


def _softmax_factor(attention: Any, config: Any) -> Said[float]:
    """The softmax scale over that of the same module without scaled positions."""
    own = _scale(attention)
    if own is None:
        return Unsaid(f"{_name(attention)} has no attribute scaling")
    config = copy.deepcopy(getattr(attention, "config", config))
    given = getattr(config, "rope_parameters", None)
    if not given:
        return 1.0
    nested = any(isinstance(value, Mapping) for value in given.values())
    config.rope_parameters = (
        {kind: _unscaled(value) for kind, value in given.items()} if nested else _unscaled(given)
    )
    with torch.device("meta"):
        try:
            plain = _scale(type(attention)(config, attention.layer_idx))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return Unsaid(f"{_name(attention)} cannot be built without scaling: {error}")
    return own / plain if plain else Unsaid("its softmax scale is 0")


def _unscaled(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    kept = {key: value for key, value in given.items() if key in _PLAIN or "section" in key}
    more = {key: value for key, value in given.items() if key.startswith(("llama_4", "original"))}
    return {"rope_type": "default", **kept, **more}


def _scale(attention: Any) -> float | None:
    names = ("scaling", "softmax_scale", "scale_attn")
    found = next((v for n in names if (v := getattr(attention, n, None)) is not None), None)
    return float(found) if isinstance(found, int | float) else None


def _window(attention: Any, config: Any) -> Said[int | None]:
    """What the attention module passes on as ``sliding_window``."""
    try:
        found = keyword_of(attention, "sliding_window")
    except Unclear as error:
        found = getattr(attention, "sliding_window", Unsaid(str(error)))
    if isinstance(found, Unsaid) and not getattr(config, "sliding_window", None):
        return None
    return found


def _key(facts: Facts) -> Any:
    """Equal for layers with equal facts."""
    values = {**vars(facts), "layers": None}
    given = values["frequencies"]
    if not isinstance(given, Unsaid):
        values["frequencies"] = tuple(sorted(given.items()))
    return tuple(values.values())
