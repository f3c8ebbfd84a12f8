"""Parts of a page of text about a class: its title, its options, an example."""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from posenc.study import picture


def picture_file(text: str) -> str:
    """The value of an option that names the file of a picture."""
    try:
        picture.form_of(text)
    except ValueError:
        accepted = ", ".join(f".{form}" for form in picture.FORMATS)
        message = f"accepted: a name that ends in one of {accepted}, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
    return text


def title_of(kind: type) -> str:
    """First line of the docstring; empty for the signature that ``dataclass`` writes."""
    first, *_ = inspect.cleandoc(kind.__doc__ or "").splitlines() or [""]
    return "" if first.startswith(f"{kind.__name__}(") else first


def list_parameters(
    title: str, parameters: Sequence[inspect.Parameter], texts: Mapping[str, str], width: int
) -> list[str]:
    """Name, type and default of each parameter, and its text from the docstring below."""
    lines = ["", f"{title}:" if parameters else f"{title}: none"]
    for p in parameters:
        kind = "" if p.annotation is p.empty else f"  {_type(p.annotation)}"
        default = "needed" if p.default is p.empty else f"default {p.default!r}"
        head = f"  {p.name}{kind}, {default}" if kind else f"  {p.name}  {default}"
        lines += textwrap.wrap(head, width, subsequent_indent=" " * 6)
        text = texts.get(p.name, "").replace("`", "")
        lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines


def example_of(name: str, options: Sequence[inspect.Parameter], width: int) -> list[str]:
    """How to write the first option on the command line."""
    plain = [p for p in options if isinstance(p.default, str | int | float)]
    labels = [f"{name}:{p.name}={p.default}" for p in plain[:1]]
    texts = [f"On the command line, options follow a colon: {label}" for label in labels]
    return [line for text in texts for line in ("", *textwrap.wrap(text, width))]


def signature_of(source: Any) -> inspect.Signature:
    """With types instead of their names, if all names can be looked up."""
    signature = inspect.signature(source)
    try:
        hints = get_type_hints(source)  # those of inherited fields by the names of their own module
    except (NameError, AttributeError, TypeError):  # imported for type checkers alone; no function
        return signature
    parameters = signature.parameters.values()
    return signature.replace(
        parameters=[p.replace(annotation=hints.get(p.name, p.annotation)) for p in parameters]
    )


def docstring_texts(source: Any) -> dict[str, str]:
    """Texts of numpydoc's ``Parameters`` sections by name; a class inherits those of its bases."""
    texts: dict[str, str] = {}
    for kind in reversed(getattr(source, "__mro__", (source,))):
        lines = inspect.cleandoc(kind.__doc__ or "").splitlines()
        heads = [n for n in range(1, len(lines)) if re.fullmatch("-{3,}", lines[n])]
        starts = [n + 1 for n in heads if lines[n - 1] == "Parameters"]
        for start in starts:
            end = min([n - 1 for n in heads if n > start], default=len(lines))
            texts |= _section_texts(lines[start:end])
    return texts


def _type(annotation: Any) -> str:
    """A type as text: the accepted values of a ``Literal``, the name of a class."""
    if get_origin(annotation) is Literal:
        return " or ".join(repr(value) for value in get_args(annotation))
    if isinstance(annotation, str):
        return annotation
    if get_origin(annotation) in (Union, UnionType):  # Union, if a part is a Literal
        parts = get_args(annotation)
        either = " or " if any(get_origin(part) is Literal for part in parts) else " | "
        return either.join(map(_type, parts))
    if annotation is NoneType:
        return "None"
    if get_origin(annotation) is not None:
        return str(annotation).replace("collections.abc.", "").replace("typing.", "")
    return getattr(annotation, "__name__", None) or str(annotation)


def _section_texts(lines: Sequence[str]) -> dict[str, str]:
    """Texts by name: ``name`` or ``name, other : type`` at the margin, then indented text."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith(" "):
            texts |= {name: f"{texts.get(name, '')} {line.strip()}".strip() for name in names}
        elif line:
            if not "".join(lines[number + 1 : number + 2]).startswith(" "):
                break  # a paragraph after the last entry
            names = [name.strip() for name in line.partition(":")[0].split(",")]
    return texts
