"""Schemes as they are named on the command line: which serve a layer, with which window.

``rope`` or ``rope:base=500000`` is one scheme, ``rope+alibi`` the sum of two on one layer,
``rope/nope`` gives layers in turn, and ``rope@512`` a layer whose queries see keys at
``|q_pos - k_pos| < 512``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from posenc.layers import LayerPlan
from posenc.protocol import PositionScheme
from posenc.schemes import Sum, fitted_options, make

# A + begins the next name, unless it is the sign of a number: 1e+5.
_PLUS = r"\+(?![\d.])"
# What follows a comma and reads word=value is one more option of the label before it.
_BETWEEN = r",(?!\w+=)|\s+"
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")
_ACCEPTED = (
    "accepted: name or name:option=value,option=value; a+b for their sum on one layer, "
    "a/b for layers in turn, a@512 for a layer with a window of 512"
)


class Sizes(Protocol):
    """What a model tells a scheme about itself."""

    @property
    def train_len(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def heads(self) -> int: ...


@dataclass(frozen=True)
class Part:
    """A name of the catalogue, and options for its maker; ``text`` is how it was written."""

    name: str
    options: tuple[tuple[str, Any], ...]
    text: str

    def make(self, **sizes: int) -> PositionScheme:
        """The scheme; its own options outweigh those that it fits to the sizes."""
        for option, _ in self.options:
            if option in sizes:
                raise ValueError(f"{option} of {self.name!r} is the model's, not an option")
        return make(self.name, **sizes, **dict(self.options))


@dataclass(frozen=True)
class Layer:
    """What serves a layer: a scheme or a sum of several, inside a window or none."""

    parts: tuple[Part, ...]
    window: int | None

    def make(self, **sizes: int) -> PositionScheme:
        """The scheme, or the sum."""
        made = [part.make(**sizes) for part in self.parts]
        return made[0] if len(made) == 1 else Sum(*made)


def layers(label: str, sizes: Sizes) -> LayerPlan:
    """A plan of the layers, those of ``label`` in turn. Tables reach to the longest evaluation."""
    given = parse(label)
    if len(given) > sizes.layers:
        raise ValueError(f"{label!r} names {len(given)} layers for layers={sizes.layers}")
    made = [layer.make(**_sizes(sizes)) for layer in given]
    return LayerPlan.of(made, sizes.layers, [layer.window for layer in given])


def _sizes(sizes: Sizes) -> dict[str, int]:
    """The model, under the names that a maker knows."""
    return {
        "num_heads": sizes.heads,
        "head_dim": sizes.dim // sizes.heads,
        "dim": sizes.dim,
        "max_len": sizes.longest,
        "train_len": sizes.train_len,
    }


def parse(label: str) -> tuple[Layer, ...]:
    """The layers that a label names.

    ``name[:option=value[,option=value...]]``; several of them joined by ``+`` are a sum, ``@W``
    after it is its window, and ``/`` begins the next layer. Values in quotes or brackets may hold
    any of these signs.

    Raises
    ------
    ValueError
        A label that reads otherwise.
    """
    text, held = _sheltered(label)
    try:
        return tuple(_layer(one, held) for one in text.split("/"))
    except _LabelError as error:
        raise ValueError(f"scheme {label!r} {error}; {_ACCEPTED}") from None


def split(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels separated by spaces or commas; ``rope:base=5,layout=half + nope`` stays one."""
    text, held = _sheltered(" ".join(labels))
    found = re.split(_BETWEEN, text)
    return tuple(_restored(label, held) for label in found if label)


def fitted_settings(labels: Iterable[str], sizes: Sizes) -> dict[str, str]:
    """What schemes fit to the model where labels leave it open: ``t5``, ``"causal=True, ..."``.

    By name and options as they are written in a label; most have nothing.
    """
    parts = [part for label in labels for layer in parse(label) for part in layer.parts]
    found = {}
    for part in parts:
        fitted = fitted_options(part.name, _sizes(sizes))
        own = [f"{key}={value!r}" for key, value in fitted.items() if key not in dict(part.options)]
        if own:
            found[part.text] = ", ".join(own)
    return found


class _LabelError(ValueError):
    """What is wrong with a label, without the label."""


def _sheltered(text: str) -> tuple[str, list[str]]:
    """Quotes and brackets become numbers between zero bytes, spaces around signs go."""
    held: list[str] = []

    def hold(found: re.Match[str]) -> str:
        held.append(found.group())
        return f"\0{len(held) - 1}\0"

    while _QUOTED.search(text):  # the innermost first
        text = _QUOTED.sub(hold, text)
    return re.sub(r"\s*([+:=,/@])\s*", r"\1", text.strip()), held


def _restored(text: str, held: list[str]) -> str:
    for place in reversed(range(len(held))):
        text = text.replace(f"\0{place}\0", held[place])
    return text


def _layer(text: str, held: list[str]) -> Layer:
    summed, at, width = text.partition("@")
    parts = tuple(_part(part, held) for part in re.split(_PLUS, summed))
    if not at:
        return Layer(parts, None)
    if not re.fullmatch("0*[1-9][0-9]*", width):
        shown = _restored(width, held)
        raise _LabelError(
            f"has a window {shown!r}; it is an integer of at least 1 and ends a layer"
        )
    return Layer(parts, int(width))


def _part(text: str, held: list[str]) -> Part:
    shown = _restored(text, held)
    name, _, rest = text.partition(":")
    if not name:
        raise _LabelError(f"has no name before {shown!r}" if shown else "has an empty name")
    if "=" in name:
        raise _LabelError(f"has an option without a name, {shown!r}")
    options = []
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise _LabelError(
                f"has an option {_restored(item, held)!r}, which must read name=value"
            )
        options.append((key, _value(_restored(value, held))))
    return Part(_restored(name, held), tuple(options), shown)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
