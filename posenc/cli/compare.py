"""``posenc compare``: its options are the fields of ``Study``."""

from __future__ import annotations

import argparse
import typing
from dataclasses import Field, fields
from typing import Any

from posenc.study import Study, terminal
from posenc.study.specs import split
from posenc.study.tasks.text import Text

TEXT_DEFAULTS = Text.defaults()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one option per field of ``Study``."""
    kinds = typing.get_type_hints(Study)
    for item in fields(Study):
        _add_option(parser, item, kinds[item.name])


def run(options: dict[str, Any]) -> int:
    """Run the study and return its exit status."""
    for name in ("schemes", "windowed", "task"):
        options[name] = split(options[name]) if options[name] else ()
    if options["eval_lens"] is not None:
        options["eval_lens"] = tuple(n for some in options["eval_lens"] for n in some)
    tuples = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    return terminal.compare(Study(**{**options, **tuples}))


def _add_option(parser: argparse.ArgumentParser, item: Field[Any], kind: Any) -> None:
    name = f"--{item.name.replace('_', '-')}"
    if kind is bool:
        parser.add_argument(name, action="store_true", help=item.metadata["help"])
        return
    many = typing.get_origin(kind) is tuple
    element = typing.get_args(kind)[0] if many else kind
    usual: Any = item.default
    default = " ".join(map(str, usual)) if many and usual else usual
    if usual is None and item.name in TEXT_DEFAULTS:
        default = f"{TEXT_DEFAULTS[item.name]} for text" if TEXT_DEFAULTS[item.name] else ""
    shown = f" (default: {default})" if default not in ("", 0, None, ()) else ""
    parser.add_argument(
        name,
        type=_integers if (many, element) == (True, int) else element,
        action=_Together if many else "store",
        nargs=("*" if usual else "+") if many else None,  # --windowed without a name: no scheme
        default=usual,
        metavar={int: "N", float: "X", str: "NAME"}[element],
        help=f"{item.metadata['help']}{shown}",
    )


class _Together(argparse.Action):
    """The values of an option that is given several times are those of all of them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        given = [] if before is self.default else list(before)
        setattr(namespace, self.dest, [*given, *values])


def _integers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        message = f"accepted: integers separated by spaces or commas, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
