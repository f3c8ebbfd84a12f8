"""``apply``: a model of transformers computes its positions and attention with posenc."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from posenc.backend import (
    LayerPlan,
    PositionScheme,
    check_choice,
    check_flag,
    has_embedding,
    lookback,
    nearest,
)
from posenc.schemes import Chunk, Sink, Sum
from posenc_torch.api import IMPLEMENTATIONS
from posenc_torch.hf.families import FAMILIES, REFUSED
from posenc_torch.hf.family import Family
from posenc_torch.hf.fit import check_fit
from posenc_torch.hf.frequencies import plan_as_built
from posenc_torch.hf.layer import CROSS, IDS, LAYER, ForwardPositions, Layer, attention_function
from posenc_torch.hf.learned import NAME as _NAME
from posenc_torch.hf.learned import RECORD, Learned, embed_of, params_of, take_saved
from posenc_torch.hf.masks import mask_function

Model = TypeVar("Model", bound=nn.Module)
# Attention and masks of models that were given to ``apply``; and of our masks alone: transformers
# makes no model from a configuration that names it.
_ATTENTION, _MASKS = "posenc_applied", "posenc_masks"
_APPLIED = "_posenc_applied"


class Applied:
    """What ``apply`` changed in a model, so that ``remove`` can change it back."""

    def __init__(self) -> None:
        self.undo: list[Any] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or of a configuration."""
        if name in vars(owner):
            self.undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
        else:
            self.undo.append(functools.partial(delattr, owner, name))
        setattr(owner, name, value)

    def before(self, module: nn.Module, hook: Any) -> None:
        """Call ``hook(module, args, kwargs)`` before a module."""
        self.undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(self, module: nn.Module, hook: Any) -> None:
        """Call ``hook(module, args, kwargs, output)`` after a module."""
        self.undo.append(module.register_forward_hook(hook, with_kwargs=True).remove)


def apply(
    model: Model,
    scheme: PositionScheme | Sequence[PositionScheme] | LayerPlan | None = None,
    *,
    implementation: str = "auto",
    fresh: bool = False,
) -> Model:
    """Let a model of transformers compute positions and attention with posenc; return the model.

    Its weights stay, and so do its windows, sinks, softmax scale, caps of scores, and norms of
    queries and keys. ``remove(model)`` undoes it.

    Parameters
    ----------
    model
        A model of transformers of one of the ``FAMILIES``, with any head, changed in place.
    scheme
        Instead of the model's own positions: one scheme for every layer, or a list that the layers
        repeat, with the windows of the model; or a plan, which has its own. Chunks (Llama 4) are
        part of the model's plan, so another scheme has none. Its learned arrays are parameters of
        the model, ``model.posenc``; those of a ``shared`` scheme, as T5's, are one set for all
        layers. An embedding is added before the first layer. None: the positions of the family.
    implementation
        That of ``posenc_torch.attention``.
    fresh
        Whether learned arrays of the scheme have first values in any case. By default they are
        the present ones of an earlier ``apply``, or those that ``save_pretrained`` stored with the
        model, if ``from_pretrained`` read it from a folder that has them.

    Raises
    ------
    ImportError
        transformers is not installed.
    NotImplementedError
        In a call: ``output_attentions``, or dropout of attention weights.
    TypeError, ValueError
        The family is not known, or the model is not built as its family is; the scheme does not
        fit the heads of the model, or the arrays that are stored with it; the model was saved with
        arrays that are not found.
    """
    kind, family, parts = _parts(model)
    check_choice("implementation", implementation, ("auto", *IMPLEMENTATIONS))
    stacks = _stacks(kind, family, parts)
    plan = _plan(kind, family, stacks)
    modules = [attention for _, layers in stacks for _, attention in layers]
    own = None if scheme is None else _swapped(scheme, plan)
    learned = None if own is None else _learned(own, modules, model, fresh)
    remove(model)
    if any(hasattr(attention, LAYER) for attention in modules):
        raise ValueError("model is part of one that was given to apply: give remove that one first")
    _register()
    applied = Applied()
    setattr(model, _APPLIED, applied)
    positions = ForwardPositions()
    if learned is not None:
        model.add_module(_NAME, learned.to(next(model.parameters()).device))
        applied.undo.append(functools.partial(delattr, model, _NAME))
    places = [
        (place, len(layers), *each) for _, layers in stacks for place, each in enumerate(layers)
    ]
    for index, (place, count, block, attention) in enumerate(places):
        chosen = plan.schemes[index] if own is None else own.schemes[index]
        embeds = place == 0 and own is not None and any(map(has_embedding, own.schemes))
        layer = Layer(
            index=place,
            layers=count,
            scheme=_with_sink(chosen, plan.schemes[index]) if own is not None else chosen,
            window=(own or plan).windows[index],
            family=family,
            implementation=implementation,
            positions=positions,
            source=modules[plan.sources[index]],
            first=(own or plan).sources[index],
            own_params=None if learned is None else params_of(model, index),
            embed=embed_of(model) if learned is not None and embeds else None,
            reads_more=own is not None and _reach(own, index) > _reach(plan, index),
        )
        applied.replace(attention, LAYER, layer)
        for name, value in family.off.items():
            applied.replace(attention, name, value)
        applied.before(block, layer.before_layer)
        applied.before(attention, layer.before_attention)
    for module in _children(family.cross, parts):
        applied.replace(module, CROSS, True)
    for module in _rotary(kind, family, parts):
        applied.after(module, _no_rotation)
    for part in parts:
        applied.before(part, _refuse)
        applied.before(part, positions.forget)
        applied.after(part, positions.end)
    _own_configs(model)
    own_config: Any = model.config
    if learned is not None:
        shapes = {name: list(array.shape) for name, array in learned.named_parameters()}
        for config in {id(c): c for c in (own_config, own_config.get_text_config())}.values():
            applied.replace(config, RECORD, shapes)
    for config in (own_config.get_text_config(), *(part.config for part in parts)):
        name = _MASKS if family.own_attention else _ATTENTION
        applied.replace(config, "_attn_implementation_internal", name)
    family.prepare(model, applied)
    return model


def _learned(own: LayerPlan, modules: list[Any], model: Any, fresh: bool) -> Learned:
    """The arrays of a caller's plan, whose schemes fit the model: stored ones, or first values."""
    learned = Learned(own)
    check_fit(own, learned, modules, model.config.get_text_config())
    if not check_flag("fresh", fresh):
        take_saved(learned, model)
    return learned


def remove(model: Model) -> Model:
    """Undo ``apply``: the model computes its own positions and attention again; return it.

    Also where ``apply`` was given a part of the model.
    """
    for module in list(model.modules()):
        applied = vars(module).pop(_APPLIED, None)
        for undo in reversed(applied.undo if applied else ()):
            undo()
    return model


def _own_configs(model: nn.Module) -> None:
    """Give a model copies of its configurations, which other models may have too."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)


def _parts(model: Any) -> tuple[str, Family, list[Any]]:
    """The ``model_type`` of a model's text, its family, and the modules that have this type."""
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ImportError(
            "posenc_torch.hf needs transformers: pip install 'transformers>=5'"
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be one of transformers, got {type(model).__name__}")
    kind = model.config.get_text_config().model_type
    if kind in REFUSED:
        raise ValueError(f"model_type {kind!r} is not served: {REFUSED[kind]}")
    if kind not in FAMILIES:
        raise ValueError(
            f"model_type {kind!r} is not served{nearest(kind, FAMILIES)}; accepted: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    parts = [
        m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config.model_type == kind
    ]
    return kind, FAMILIES[kind], parts


Stack = tuple[Any, list[tuple[nn.Module, Any]]]  # a model, its layers and their attention modules


def _stacks(kind: str, family: Family, parts: list[Any]) -> list[Stack]:
    """The stacks of layers in order: one, or an encoder's and a decoder's."""
    found: dict[Any, tuple[nn.Module, Any]] = {}
    for part in parts:  # a later part is inside of an earlier one, or beside it
        for module in part.modules():
            attention = getattr(module, family.attention, None)
            if isinstance(attention, nn.Module) and _is_of(kind, attention):
                found[attention] = module, part
    stacks: dict[Any, list[tuple[nn.Module, Any]]] = {}
    for attention, (module, part) in found.items():
        stacks.setdefault(part, []).append((module, attention))
    return list(stacks.items())


def _plan(kind: str, family: Family, stacks: list[Stack]) -> LayerPlan:
    """The plans of all stacks, one after another."""
    plans = [
        plan_as_built(family.plan, part.config, [attention for _, attention in layers], part)
        for part, layers in stacks
    ]
    for plan, (_, layers) in zip(plans, stacks, strict=True):
        if len(layers) != len(plan):
            raise ValueError(
                f"model has {len(layers)} modules {family.attention!r} of {kind!r}, and its plan "
                f"has {len(plan)} layers"
            )
    if not stacks:
        raise ValueError(f"model of {kind!r} has no module {family.attention!r}")
    schemes = (scheme for plan in plans for scheme in plan.schemes)
    return LayerPlan(tuple(schemes), tuple(window for plan in plans for window in plan.windows))


def _rotary(kind: str, family: Family, parts: list[Any]) -> list[nn.Module]:
    """The modules that make the angles of the model's text."""
    found = [module for module in _children(family.rotary, parts) if _is_of(kind, module)]
    if family.rotary is not None and not found:
        raise ValueError(f"model of {kind!r} has no module {family.rotary!r}")
    return found


def _children(name: str | None, parts: list[Any]) -> list[nn.Module]:
    """The modules of this name, each once."""
    found = {
        child: None
        for part in parts
        for module in part.modules()
        for own, child in module.named_children()
        if own == name
    }
    return list(found)


def _is_of(kind: str, module: Any) -> bool:
    """Whether a module has the configuration of text, or none at all."""
    return getattr(getattr(module, "config", None), "model_type", kind) == kind


def _swapped(scheme: Any, plan: LayerPlan) -> LayerPlan:
    """The plan of a scheme that the caller gives: with the model's windows, if it has none."""
    if isinstance(scheme, LayerPlan):
        return LayerPlan.of(scheme, len(plan))
    return LayerPlan.of(scheme, len(plan), list(plan.windows))


def _reach(plan: LayerPlan, index: int) -> float:
    """How many tokens before the query and with it a layer reads."""
    scheme, window = plan.schemes[index], plan.windows[index]
    parts = scheme.schemes if isinstance(scheme, Sum) else (scheme,)
    chunks = [part.size for part in parts if isinstance(part, Chunk)]
    return min([math.inf if window is None else window, *chunks]) + lookback(scheme)


def _with_sink(scheme: PositionScheme, of_family: PositionScheme) -> PositionScheme:
    """``scheme`` with the sinks that the family has, whose logits are weights of the model."""
    return replace(of_family, scheme=scheme) if isinstance(of_family, Sink) else scheme


def _no_rotation(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook after a rotary module: cosines of 1 and sines of 0, or complex numbers of 1.

    They carry the positions to the layers, also to one that gradient checkpointing repeats later.
    """
    alone = isinstance(output, torch.Tensor)
    ones = torch.ones_like(output if alone else output[0])
    setattr(ones, IDS, args[1] if len(args) > 1 else kwargs["position_ids"])
    return ones if alone else (ones, torch.zeros_like(output[1]))


def _refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Hook before a model: what no implementation of posenc returns is an error."""
    if module.config._attn_implementation not in (_ATTENTION, _MASKS):
        raise RuntimeError(
            f"attention is {module.config._attn_implementation!r}, but positions are posenc's; use "
            "posenc_torch.hf.remove(model) instead of set_attn_implementation"
        )
    if getattr(module, "_is_replica", False):
        raise NotImplementedError(
            "DataParallel: its threads would read each other's positions; use "
            "DistributedDataParallel"
        )
    if kwargs.get("return_shared_kv_states"):
        raise NotImplementedError(
            "return_shared_kv_states=True: the model's keys are rotated, and posenc's are not yet; "
            "use posenc_torch.hf.remove(model)"
        )
    for given in (kwargs.get("output_attentions"), getattr(module.config, "output_attentions", 0)):
        if given:
            raise NotImplementedError(
                "output_attentions=True: posenc returns no weights, which are L x L, and no fast "
                "implementation holds them; use posenc_torch.hf.remove(model)"
            )


def _register() -> None:
    """Make our functions known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, attention_function)
    for name in (_ATTENTION, _MASKS):
        AttentionMaskInterface.register(name, mask_function)
