"""Labels of schemes on the command line: the schemes and the window of each layer.

``rope`` or ``rope:base=500000`` is one scheme, ``rope+alibi`` the sum of two on one layer,
``rope/nope`` gives layers in turn, and ``rope@512`` a layer whose queries see keys at
``|q_pos - k_pos| < 512``. A plan of ``posenc.presets`` is a label of its own: ``rnope`` or
``rnope:window=16``. ``rope~rope_yarn`` is trained as ``rope`` and tested as ``rope_yarn``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from posenc.contract.protocol import PositionScheme
from posenc.layers import LayerPlan
from posenc.makers import catalogue, fitted_options, make
from posenc.presets import PLANS, named
from posenc.schemes import Sum
from posenc.study.float_positions import with_float_positions

# A "+" starts the next name, unless it is the sign of a number: 1e+5.
_PLUS = r"\+(?![\d.])"
# After a comma, word=value is another option of the same label.
_BETWEEN = r",(?!\w+=)|\s+"
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")
_ACCEPTED = (
    "accepted: name or name:option=value,option=value; a+b for their sum on one layer, "
    "a/b for layers in turn, a@512 for a layer with a window of 512, a~b to train as a and test "
    "as b"
)
ALL = "all"  # the label that stands for the whole catalogue


class Sizes(Protocol):
    """The sizes of a model that a scheme can depend on."""

    @property
    def train_tokens(self) -> int: ...
    @property
    def longest_tokens(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def positions_reach(self) -> int: ...
    @property
    def random_float_positions(self) -> int: ...
    @property
    def finetune_steps(self) -> int: ...


@dataclass(frozen=True)
class Part:
    """A name of the catalogue and options for its maker; ``text`` is the original label."""

    name: str
    options: tuple[tuple[str, Any], ...]
    text: str

    def make(self, **sizes: int) -> PositionScheme:
        """The scheme; these options take precedence over those fitted to the sizes."""
        if self.name in PLANS:
            raise ValueError(f"{self.name!r} is a plan of all layers, so it is a label of its own")
        arguments = self.with_options(sizes)
        if not self.options:
            return make(self.name, **arguments)
        try:
            return make(self.name, **arguments)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"scheme {self.text!r}: {error}") from error

    def with_options(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Arguments of a maker: the sizes and these options."""
        for option, _ in self.options:
            if option in sizes:
                raise ValueError(
                    f"{option} of {self.name!r} comes from the model; it is not an option"
                )
        return {**sizes, **dict(self.options)}


@dataclass(frozen=True)
class Layer:
    """The scheme of a layer, or several to sum, and its window if it has one."""

    parts: tuple[Part, ...]
    window: int | None

    def make(self, **sizes: int) -> PositionScheme:
        """The scheme, or the sum."""
        made = [part.make(**sizes) for part in self.parts]
        return made[0] if len(made) == 1 else Sum(*made)


@dataclass(frozen=True)
class Plans:
    """The layers of a model in training, and at test time, where they differ for ``a~b``."""

    trained: LayerPlan
    tested: LayerPlan

    @classmethod
    def of(cls, label: str, sizes: Sizes) -> Plans:
        """The plans of a label.

        Raises
        ------
        ValueError
            A learned array of a tested layer is not one that the trained layer has, and there is no
            fine-tuning to learn it. With fine-tuning: layers that share an array have trained one
            each. Or a scheme has no float positions.
        """
        trained, tested = (layers(side, sizes) for side in sides(label))
        if sizes.finetune_steps:
            cls(trained, tested).inherited(label)
        else:
            _check_arrays(label, trained, tested)
        if reach := sizes.random_float_positions:
            trained, tested = (
                with_float_positions(plan, reach, sizes.train_tokens, label)
                for plan in (trained, tested)
            )
        return cls(trained, tested)

    def inherited(self, label: str) -> tuple[dict[str, int], ...]:
        """For each set of learned arrays of ``tested``: its arrays that ``trained`` has too.

        They are told by name and shape, and map to the number of the set in ``trained``.

        Raises
        ------
        ValueError
            Layers that share an array in ``tested`` have one each in ``trained``.
        """
        found: list[dict[str, int]] = []
        for number, first in enumerate(self.tested.first_layers):
            served = [n for n, owner in enumerate(self.tested.owners) if owner == number]
            sources = {}
            for name, shape in _shapes(self.tested.schemes[first]).items():
                owners = {
                    self.trained.owners[layer]
                    for layer in served
                    if _shapes(self.trained.schemes[layer]).get(name) == shape
                }
                if len(owners) > 1:
                    raise ValueError(
                        f"scheme {label!r} cannot be fine-tuned: layers {served} share one learned "
                        f"array {name!r}, and have {len(owners)} of it in training"
                    )
                if owners:
                    sources[name] = owners.pop()
            found.append(sources)
        return tuple(found)


def expand(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels with ``all`` replaced by the rest of the catalogue.

    A scheme for models that were trained as another, such as a scaling of RoPE, becomes ``a~b``.
    """
    given = tuple(labels)
    found = []
    for label in given:
        found += [label] if label != ALL else [each for each in _every() if each not in given]
    return tuple(found)


def _every() -> Iterator[str]:
    for name, maker in catalogue().items():
        trained_as = getattr(maker, "trained_as", None)
        yield name if trained_as is None else f"{trained_as}~{name}"


def sides(label: str) -> tuple[str, str]:
    """The labels of training and of test time: of ``a~b`` both, of any other itself twice."""
    text, quoted = _protect(label)
    both = [_restore(side, quoted) for side in text.split("~")]
    if len(both) > 2:
        raise ValueError(f"scheme {label!r} has more than one '~'; {_ACCEPTED}")
    return both[0], both[-1]


def layers(label: str, sizes: Sizes) -> LayerPlan:
    """The plan of a model whose layers take those of ``label``, which has no ``~``, in turn.

    Tables are long enough for the longest evaluation length.
    """
    named = parse(label)
    (first, *more), *others = [layer.parts for layer in named]
    if first.name in PLANS and not more and not others and named[0].window is None:
        return PLANS[first.name](**first.with_options({**_sizes(sizes), "layers": sizes.layers}))
    if len(named) > sizes.layers:
        raise ValueError(f"{label!r} names {len(named)} layers for layers={sizes.layers}")
    try:
        made = [layer.make(**_sizes(sizes)) for layer in named]
    except ValueError as error:
        if "head_dim" not in str(error):
            raise
        raise ValueError(
            f"heads={sizes.heads} of dim={sizes.dim} do not suit {label!r}: {error}"
        ) from None
    return LayerPlan.of(made, sizes.layers, [layer.window for layer in named])


def _check_arrays(label: str, trained: LayerPlan, tested: LayerPlan) -> None:
    for layer, (own, other) in enumerate(zip(trained.schemes, tested.schemes, strict=True)):
        have, need = _shapes(own), _shapes(other)
        if not need.items() <= have.items():
            raise ValueError(
                f"scheme {label!r} cannot be tested: layer {layer} needs the learned arrays "
                f"{need}, and its training has {have or 'none'}; finetune_steps would train them"
            )


def _shapes(scheme: PositionScheme) -> dict[str, tuple[int, ...]]:
    return {name: tuple(spec.shape) for name, spec in scheme.param_specs().items()}


def _sizes(sizes: Sizes) -> dict[str, int]:
    """The model's sizes under the names that a maker knows.

    With random positions, training reaches as far as they do.
    """
    return {
        "num_heads": sizes.heads,
        "head_dim": sizes.dim // sizes.heads,
        "dim": sizes.dim,
        "hidden_dim": sizes.dim,
        "max_len": max(sizes.longest_tokens, sizes.positions_reach),
        "train_len": max(sizes.train_tokens, sizes.positions_reach),
    }


def parse(label: str) -> tuple[Layer, ...]:
    """The layers that a label names.

    A part is ``name[:option=value[,option=value...]]``, and ``+`` joins parts to a sum. ``@W``
    gives the layer a window, and ``/`` starts the next layer. Values in quotes or brackets may
    contain any of these characters.

    Raises
    ------
    ValueError
        The label does not follow this grammar.
    """
    text, quoted = _protect(label)
    try:
        if "~" in text:
            raise _LabelError("names two schemes, one to train and one to test, where one is asked")
        return tuple(_layer(one, quoted) for one in text.split("/"))
    except _LabelError as error:
        raise ValueError(f"scheme {label!r} {error}; {_ACCEPTED}") from None


def split(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels separated by spaces or commas; ``rope:base=5,layout=half + nope`` is one label."""
    text, quoted = _protect(" ".join(labels))
    pieces = re.split(_BETWEEN, text)
    return tuple(_restore(label, quoted) for label in pieces if label)


def fitted_settings(labels: Iterable[str], sizes: Sizes) -> dict[str, str]:
    """Options that schemes derive from the sizes and labels leave open.

    By name and options as written in a label: ``{"t5": "causal=True, ..."}``. Most schemes derive
    none and have no entry.
    """
    each = dict.fromkeys(side for label in labels for side in sides(label))
    parts = [part for side in each for layer in parse(side) for part in layer.parts]
    settings = {}
    given = _sizes(sizes)
    for part in parts:
        if part.name in PLANS:
            fitted = named.fitted_options(part.name, {**given, "layers": sizes.layers})
        else:
            fitted = fitted_options(part.name, {**given, **dict(part.options)})
        own = [f"{key}={value!r}" for key, value in fitted.items() if key not in dict(part.options)]
        if own:
            settings[part.text] = ", ".join(own)
    return settings


class _LabelError(ValueError):
    """The fault of a label, as a sentence without its subject."""


def _protect(text: str) -> tuple[str, list[str]]:
    """Replace quotes and brackets by numbers between zero bytes; drop spaces around separators."""
    quoted: list[str] = []

    def replace(match: re.Match[str]) -> str:
        quoted.append(match.group())
        return f"\0{len(quoted) - 1}\0"

    while _QUOTED.search(text):  # the innermost first
        text = _QUOTED.sub(replace, text)
    return re.sub(r"\s*([+:=,/@~])\s*", r"\1", text.strip()), quoted


def _restore(text: str, quoted: list[str]) -> str:
    for number in reversed(range(len(quoted))):
        text = text.replace(f"\0{number}\0", quoted[number])
    return text


def _layer(text: str, quoted: list[str]) -> Layer:
    summed, at, width = text.partition("@")
    parts = tuple(_part(part, quoted) for part in re.split(_PLUS, summed))
    if not at:
        return Layer(parts, None)
    if not re.fullmatch("0*[1-9][0-9]*", width):
        shown = _restore(width, quoted)
        raise _LabelError(
            f"has a window {shown!r}; it is an integer of at least 1 and ends a layer"
        )
    return Layer(parts, int(width))


def _part(text: str, quoted: list[str]) -> Part:
    shown = _restore(text, quoted)
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
                f"has an option {_restore(item, quoted)!r}, which must read name=value"
            )
        options.append((key, _value(_restore(value, quoted))))
    return Part(_restore(name, quoted), tuple(options), shown)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
