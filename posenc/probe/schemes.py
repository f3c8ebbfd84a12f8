"""Labels of schemes for a model that exists: what they leave open is taken from the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from posenc.contract.protocol import PositionScheme
from posenc.layers import LayerPlan
from posenc.makers import maker_of
from posenc.presets import PLANS
from posenc.schemes import RoPE, Sink, Sum
from posenc.study.identity import description
from posenc.study.specs import Layer, Part, parse

_OF_ROPE = ("base", "layout", "rotary_dim")


def scheme_of(
    label: str, sizes: Mapping[str, int], ropes: Sequence[RoPE | None]
) -> list[PositionScheme] | LayerPlan:
    """The schemes of a label, one per layer, for the weights of a model.

    Parameters
    ----------
    label
        As for ``posenc compare``, without ``~``: the weights are trained already.
    sizes
        ``layers``, and the sizes that a maker knows.
    ropes
        The RoPE of each layer of the model, or None. ``base``, ``layout``, ``rotary_dim`` and
        ``train_len`` that a label leaves open are theirs; of a layer that does not rotate, those of
        the first that does.

    Returns
    -------
    A list, which leaves the model its windows; a plan, if the label has windows or is one.
    """
    named = parse(label)
    count = sizes["layers"]
    usual = next((rope for rope in ropes if rope is not None), None)
    own = {name: size for name, size in sizes.items() if name != "layers"}
    (first, *more), *others = [layer.parts for layer in named]
    if first.name in PLANS and not more and not others and named[0].window is None:
        filled = _filled(first, usual).with_options({**own, "layers": count})
        return PLANS[first.name](**filled)
    if len(named) > count:
        raise ValueError(f"{label!r} names {len(named)} layers, and the model has {count}")
    schemes = []
    for index in range(count):
        rope = (ropes[index] if index < len(ropes) else None) or usual
        layer = named[index % len(named)]
        parts = tuple(_filled(part, rope) for part in layer.parts)
        schemes.append(Layer(parts, None).make(**_trained(own, rope)))
    windows = [layer.window for layer in named]
    if any(window is not None for window in windows):
        return LayerPlan.of(schemes, count, [windows[i % len(windows)] for i in range(count)])
    return schemes


def rope_in(scheme: PositionScheme) -> RoPE | None:
    """The RoPE that a scheme is, or has as a part."""
    if isinstance(scheme, Sink):
        return rope_in(scheme.scheme)
    parts = scheme.schemes if isinstance(scheme, Sum) else (scheme,)
    return next((part for part in parts if isinstance(part, RoPE)), None)


def _scaled_from(scheme: PositionScheme) -> int | None:
    """The length of training that the scaling of a scheme's RoPE has."""
    length: int | None = getattr(getattr(rope_in(scheme), "scaling", None), "train_len", None)
    return length


def about(scheme: list[PositionScheme] | LayerPlan) -> list[Any]:
    """What the numbers of a row depend on, as JSON: the schemes and the windows of its layers."""
    if isinstance(scheme, LayerPlan):
        return [[description(one) for one in scheme.schemes], list(scheme.windows)]
    return [[description(one) for one in scheme]]


def taken(
    label: str, scheme: list[PositionScheme] | LayerPlan, ropes: Sequence[RoPE | None]
) -> str:
    """What a scheme has from the model, where its label leaves it open; empty for nothing."""
    found: dict[str, list[Any]] = {}
    every = [part for layer in parse(label) for part in layer.parts]
    if not any("train_len" in dict(part.options) for part in every):
        lengths = map(_scaled_from, scheme if isinstance(scheme, list) else scheme.schemes)
        if known := list(dict.fromkeys(n for n in lengths if n is not None)):
            found["train_len"] = known
    for part in every:
        before = dict(part.options)
        for rope in ropes:
            for name, value in _filled(part, rope).options:
                if name not in before and value not in found.setdefault(name, []):
                    found[name].append(value)
    return ", ".join(f"{name}={' or '.join(map(str, values))}" for name, values in found.items())


def _filled(part: Part, rope: RoPE | None) -> Part:
    """The part with the options of the model's RoPE that it knows and leaves open."""
    if rope is None:
        return part
    known = _options(part.name)
    given = dict(part.options)
    own = {name: getattr(rope, name) for name in _OF_ROPE if name in known - given.keys()}
    own = {name: value for name, value in own.items() if value is not None}
    return Part(part.name, (*part.options, *own.items()), part.text)


def _options(name: str) -> set[str]:
    """The options of a plan or of a scheme."""
    if name in PLANS:
        return set(inspect.signature(PLANS[name]).parameters)
    kind = inspect.unwrap(maker_of(name))
    return {field.name for field in fields(kind)} if is_dataclass(kind) else set()


def _trained(sizes: Mapping[str, int], rope: RoPE | None) -> dict[str, int]:
    """The sizes with the length at which the model was trained, before its own scaling."""
    before = getattr(getattr(rope, "scaling", None), "train_len", None)
    return {**sizes, "train_len": before} if before else dict(sizes)
