"""What a configuration defines, by ``posenc.hf``: the facts that readers are held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import array_api_compat.numpy as xp

from posenc import hf
from posenc.audit.readers import Facts, Said, Unsaid
from posenc.contract.protocol import PositionScheme
from posenc.hf.config import text_part
from posenc.hf.families import family_of
from posenc.hf.mrope import AXIS_SECTIONS
from posenc.layers import LayerPlan
from posenc.schemes import MRoPE, NoPE, RoPE, Sink
from posenc.schemes.sum import Combination

FAR = 131_072
"""The length of text where a configuration has none."""


@dataclass(frozen=True)
class Definition:
    """What a configuration defines.

    Attributes
    ----------
    facts
        Layers of one type together.
    ropes
        The rotation of each of ``facts``; None: it has none.
    lengths
        Lengths of text at which frequencies are compared.
    notes, unknown
        As in ``posenc.hf.Reading``.
    part
        As in ``posenc.hf.Reading``.
    without_plan
        Why windows and the number of layers are not known; ``""``: they are.
    """

    facts: tuple[Facts, ...]
    ropes: tuple[RoPE | None, ...]
    lengths: tuple[int, ...]
    notes: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    part: str = ""
    without_plan: str = ""

    @property
    def far(self) -> int:
        """The last position of the longest text that the configuration is for."""
        return self.lengths[1] - 1


def definition(config: Mapping[str, Any]) -> Definition:
    """The facts of a whole configuration.

    Raises
    ------
    TypeError, ValueError
        As in ``posenc.hf.read``: the configuration is wrong, or says nothing about positions.
    """
    plan, without = None, ""
    try:
        plan = hf.from_hf_config(config)
    except (TypeError, ValueError) as error:
        without = f"no plan of the layers: {str(error).partition('; accepted')[0]}"
    try:
        reading = hf.read(config)
    except (TypeError, ValueError):
        if plan is None:
            raise
        reading = hf.Reading({"": NoPE()})  # ALiBi, T5's bias or a table: nothing rotates
    longest = reading.max_len or FAR
    lengths = (1, longest, 2 * longest)
    part = _part(config, reading.part)
    groups = list(_by_type(config, part, reading)) if plan is None else list(_by_layer(part, plan))
    family = family_of(part)
    facts, ropes = [], []
    for kind, layers, scheme, window in groups:
        given = Unsaid(without) if plan is None else window
        one = _facts(kind, layers, scheme, given, lengths, family.turns_back)
        if not family.planned and one.sections is None:
            one = replace(one, sections=Unsaid("the configuration has no mrope_section"))
        facts.append(one)
        ropes.append(_rope(scheme))
    return Definition(
        tuple(facts), tuple(ropes), lengths, reading.notes, reading.unknown, reading.part, without
    )


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return text_part(config)[1] if name else config


_Group = tuple[str, tuple[int, ...] | None, PositionScheme, int | None]


def _by_type(
    config: Mapping[str, Any], part: Mapping[str, Any], reading: hf.Reading
) -> Iterator[_Group]:
    """Without a plan: the types that the RoPE dictionaries distinguish."""
    sections = any(key.rpartition(".")[2] in AXIS_SECTIONS for key in reading.kept)
    for kind, rope in reading.ropes.items():
        scheme: PositionScheme = rope
        if sections and len(reading.ropes) == 1 and isinstance(rope, RoPE):
            scheme = hf.mrope_from_hf(config)
        yield kind, None, scheme, None


def _by_layer(part: Mapping[str, Any], plan: LayerPlan) -> Iterator[_Group]:
    """Layers of one type, scheme and window together; types by the configuration or its family."""
    family, count = family_of(part), len(plan)
    given = part.get("layer_types")
    if given and len(given) == count and family.reads_layer_types:
        kinds = list(given)
    elif family.layer_type is not None and family.plan is None:
        kinds = [family.layer_type(part, layer) for layer in range(count)]
    else:
        kinds = [""] * count
    groups: dict[Any, list[int]] = {}
    for layer in range(count):
        key = kinds[layer], plan.schemes[layer], plan.windows[layer]
        groups.setdefault(key, []).append(layer)
    shared = {kind for kind, *_ in groups if sum(kind == other for other, *_ in groups) > 1}
    for (kind, scheme, window), layers in groups.items():
        name = kind if len(groups) > 1 else ""
        if kind in shared:
            some = "no rotation" if _rope(scheme) is None else f"layer {layers[0]} and others"
            name = f"{kind}, {some}" if kind else some
        yield name, tuple(layers), scheme, window


def _rotation(scheme: PositionScheme) -> RoPE | MRoPE | None:
    if isinstance(scheme, RoPE | MRoPE):
        return scheme
    parts: Sequence[PositionScheme] = ()
    if isinstance(scheme, Combination):
        parts = scheme.schemes
    elif isinstance(scheme, Sink):
        parts = (scheme.scheme,)
    return next((found for part in parts if (found := _rotation(part)) is not None), None)


def _rope(scheme: PositionScheme) -> RoPE | None:
    found = _rotation(scheme)
    return found.rope if isinstance(found, MRoPE) else found


def _facts(
    kind: str,
    layers: tuple[int, ...] | None,
    scheme: PositionScheme,
    window: Said[int | None],
    lengths: Sequence[int],
    turns_back: bool,
) -> Facts:
    turning = _rotation(scheme)
    rope = _rope(scheme)
    facts = Facts(kind, layers, window=window)
    if rope is None:
        nothing = Unsaid("these layers do not rotate")
        return replace(
            facts, frequencies=dict.fromkeys(lengths, ()), layout=nothing, rotary_dim=0,
            attention_factor=nothing, softmax_factor=nothing, sections=None,
        )  # fmt: skip
    axes = _axes(turning) if isinstance(turning, MRoPE) else None
    return replace(
        facts,
        frequencies={length: rope.at_length(length).frequencies() for length in lengths},
        layout=f"{rope.layout}{', the other way' if turns_back else ''}",
        rotary_dim=rope.rotary_dim or rope.head_dim,
        attention_factor=rope.attention_factor,
        softmax_factor=rope.scale(rope.head_dim) * rope.head_dim**0.5,
        sections=axes,
    )


def _axes(scheme: MRoPE) -> tuple[int, ...]:
    """The axis of each pair; of each channel, first ones before second ones, where they differ."""
    turned: list[dict[str, Any]] = []
    for axis in range(scheme.axes):
        place = xp.asarray([[int(axis == other) for other in range(scheme.axes)]])
        turned.append(dict(scheme.rotary(place, dtype=xp.float64, params={}, xp=xp)))
    sines = [
        [table[f"sin{n}"][0] for table in turned] for n in (0, 1) if f"sin{n}" in turned[0]
    ]  # one table, or one of each pair's first and one of its second channel
    return tuple(int(axis) for each in sines for axis in xp.argmax(xp.abs(xp.stack(each)), axis=0))
