"""The plan of a model, compared with the frequencies that its own modules hold.

A configuration may have keys that the model's class does not read, as ``partial_rotary_factor`` in
a Llama. They are left out until the plan turns by the frequencies of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from posenc.backend import LayerPlan, PositionScheme
from posenc.schemes import RoPE, Sink, Sum

# Groups of keys that are left out, in every combination, the fewest first.
_GROUPS = (
    ("partial_rotary_factor", "rotary_pct"),
    ("rotary_dim",),
    ("rope_theta", "rotary_emb_base", "rope_parameters", "rope_scaling"),
)
_UNREAD = [
    sum(groups, ()) for count in range(len(_GROUPS) + 1) for groups in combinations(_GROUPS, count)
]


def plan_as_built(
    plan: Callable[[Any], LayerPlan], config: Any, attentions: list[Any], model: nn.Module
) -> LayerPlan:
    """The plan of a configuration, by the keys that the class of the model reads.

    Each layer has the first of the plans without more and more keys that fits its frequencies.

    Raises
    ------
    ValueError
        The model turns by frequencies that its configuration does not describe.
    """
    given = config.to_dict()
    given.pop("rope_interleave", None)  # which class reads it, ``Family.plan`` knows
    schemes: dict[int, PositionScheme] = {}
    plans, errors = [], list[Exception]()
    for names in _UNREAD:
        try:
            found = plan(_without(given, names))
        except (TypeError, ValueError) as error:
            errors.append(error)
            continue
        plans.append(found)
        if len(found) != len(attentions):
            return found  # the caller says so
        for layer, attention in enumerate(attentions):
            if layer not in schemes and _fits(found.schemes[layer], attention, model):
                schemes[layer] = found.schemes[layer]
        if len(schemes) == len(found):
            in_order = (schemes[layer] for layer in range(len(found)))
            return LayerPlan(tuple(in_order), plans[0].windows)
    if not plans:
        raise errors[0]
    layer = next(n for n in range(len(attentions)) if n not in schemes)
    raise ValueError(
        f"layer {layer} of {given['model_type']!r} turns by frequencies that the configuration "
        f"does not describe: it has {plans[0].schemes[layer]!r}"
    )


def _without(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """A configuration without some keys, also in the dictionaries of its rotation."""
    inner = ("rope_parameters", "rope_scaling")
    return {
        key: _inside(value, names) if key in inner else value
        for key, value in given.items()
        if key not in names
    }


def _inside(given: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(given, Mapping):
        return given
    return {key: _inside(value, names) for key, value in given.items() if key not in names}


def _fits(scheme: PositionScheme, attention: Any, model: nn.Module) -> bool:
    """Whether a layer's RoPE has frequencies and factor of one that the model holds."""
    rope = next(_ropes(scheme), None)
    held = list(_held(attention, model))
    if rope is None or not held:
        return True
    return any(_alike(rope, frequencies, factor) for frequencies, factor in held)


def _ropes(scheme: PositionScheme) -> Iterator[RoPE]:
    if isinstance(scheme, RoPE):
        yield scheme
    elif isinstance(scheme, Sum):
        for part in scheme.schemes:
            yield from _ropes(part)
    elif isinstance(scheme, Sink):
        yield from _ropes(scheme.scheme)


def _held(attention: Any, model: nn.Module) -> Iterator[tuple[Tensor, float | None]]:
    """Frequencies of the model, and the factor of their cosines."""
    table = getattr(attention, "embed_positions", None)
    if isinstance(table, Tensor) and len(table) > 1:  # GPT-J, CodeGen: sines, then cosines
        yield table[1, : table.shape[1] // 2].asin(), None
    kind = getattr(attention, "layer_type", None) or getattr(attention, "attention_type", None)
    for module in (child for name, child in model.named_modules() if name.endswith("rotary_emb")):
        names = [name for name, _ in module.named_buffers() if name.endswith("inv_freq")]
        names = [name for name in names if "original" not in name]
        for name in [name for name in names if name == f"{kind}_inv_freq"] or names:
            start = name.removesuffix("inv_freq")
            # A longer text may have changed the frequencies, as dynamic NTK does.
            held = getattr(module, f"{start}original_inv_freq", None)
            factor = getattr(module, f"{start}attention_scaling", None)
            given = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            if "short_mscale" in given:  # PhiMoE multiplies by it instead
                factor = None
            yield getattr(module, name) if held is None else held, factor


def _alike(rope: RoPE, held: Tensor, factor: float | None) -> bool:
    """Within what a dtype rounds; the order of axes (ERNIE) is the scheme's."""
    if held.is_meta:
        return True
    want = torch.tensor(rope.frequencies(), dtype=torch.float64)
    own = held.detach().to("cpu", torch.float64)
    scale = factor is None or abs(factor - rope.attention_factor) <= 1e-5 * abs(factor)
    if not scale or own.shape != want.shape:
        return False
    kind = torch.finfo(held.dtype)
    error, least = max(1e-4, 2 * kind.eps), max(1e-9, 2 * kind.tiny * kind.eps)
    return torch.allclose(own.sort().values, want.sort().values, rtol=error, atol=least)
