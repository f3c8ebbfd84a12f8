"""Schemes as they are named on the command line: ``rope``, ``rope:base=500000``, ``rope+nope``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from posenc.protocol import PositionScheme
from posenc.schemes import make

# A + begins the next name, unless it is the sign of a number: 1e+5.
_PLUS = r"\+(?![\d.])"
# What follows a comma and reads word=value is one more option of the label before it.
_BETWEEN = r",(?!\w+=)|\s+"
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")


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
    """A name of the catalogue, and options for its maker."""

    name: str
    options: tuple[tuple[str, Any], ...]

    def make(self, defaults: Mapping[str, Any] | None = None, **sizes: int) -> PositionScheme:
        """The scheme; its own options outweigh ``defaults``."""
        for option, _ in self.options:
            if option in sizes:
                raise ValueError(f"{option} of {self.name!r} is the model's, not an option")
        return make(self.name, **sizes, **{**(defaults or {}), **dict(self.options)})


def layers(label: str, sizes: Sizes) -> tuple[PositionScheme, ...]:
    """One scheme a layer, those of ``label`` in turn. Tables reach to the longest evaluation."""
    fitted = _fitted(sizes.train_len)
    made = [
        part.make(
            fitted.get(part.name.lower()),
            num_heads=sizes.heads,
            head_dim=sizes.dim // sizes.heads,
            dim=sizes.dim,
            max_len=sizes.longest,
        )
        for part in parse(label)
    ]
    if len(made) > sizes.layers:
        raise ValueError(f"{label!r} names {len(made)} schemes for layers={sizes.layers}")
    return tuple(made[layer % len(made)] for layer in range(sizes.layers))


def parse(label: str) -> tuple[Part, ...]:
    """``name[:option=value[,option=value...]]``, several joined by ``+``."""
    text, held = _sheltered(label)
    return tuple(_part(part, held) for part in re.split(_PLUS, text))


def split(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels separated by spaces or commas; ``rope:base=5,layout=half + nope`` stays one."""
    text, held = _sheltered(" ".join(labels))
    found = re.split(_BETWEEN, text)
    return tuple(_restored(label, held) for label in found if label)


def _sheltered(text: str) -> tuple[str, list[str]]:
    """Quotes and brackets become numbers between zero bytes, spaces around signs go."""
    held: list[str] = []

    def hold(found: re.Match[str]) -> str:
        held.append(found.group())
        return f"\0{len(held) - 1}\0"

    while _QUOTED.search(text):  # the innermost first
        text = _QUOTED.sub(hold, text)
    return re.sub(r"\s*([+:=,])\s*", r"\1", text.strip()), held


def _restored(text: str, held: list[str]) -> str:
    for place in reversed(range(len(held))):
        text = text.replace(f"\0{place}\0", held[place])
    return text


def _part(text: str, held: list[str]) -> Part:
    name, _, rest = text.partition(":")
    if not name or "=" in name:
        shown = _restored(text, held)
        raise ValueError(f"scheme {shown!r} must read name or name:option=value,option=value")
    options = []
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"option {item!r} of scheme {text!r} must read name=value")
        options.append((key, _value(_restored(value, held))))
    return Part(name, tuple(options))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _fitted(train_len: int) -> Mapping[str, Mapping[str, Any]]:
    """Options that depend on the training length: no T5 bucket may stay unseen in training."""
    buckets = max(2, min(32, train_len))
    return {"t5": {"causal": True, "num_buckets": buckets, "max_distance": train_len}}


def fitted_options(labels: Iterable[str], train_len: int) -> dict[str, dict[str, Any]]:
    """What a study sets of a scheme that its label leaves open, by label; most have nothing."""
    fitted = _fitted(train_len)
    found = {
        label: {
            option: value
            for part in parse(label)
            for option, value in fitted.get(part.name.lower(), {}).items()
            if option not in dict(part.options)
        }
        for label in labels
    }
    return {label: options for label, options in found.items() if options}
