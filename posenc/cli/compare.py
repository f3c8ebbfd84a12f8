"""``posenc compare``: its options are the fields of ``Study``."""

from __future__ import annotations

import argparse
import typing
from dataclasses import Field, fields
from typing import Any

from posenc.cli.parser import Parser
from posenc.study import Study, terminal
from posenc.study.dry_run import dry_run
from posenc.study.specs import split
from posenc.study.tasks.text import Text

TEXT_DEFAULTS = Text.defaults()
_FIRST = (  # what most need, on the first page of help
    "schemes", "task", "text", "train_len", "eval_lens", "seeds", "steps", "layers",
    "dim", "heads", "backend", "device", "out",
)  # fmt: skip
_RARE = {
    "training": (
        "sweep", "sweep_seeds", "batch_size", "learning_rate", "position_lr_scale", "warmup",
        "weight_decay", "clip", "random_positions", "random_float_positions", "model", "workers",
        "scheduler", "keep_weights", "tracker",
    ),
    "fine-tuning": ("finetune_steps", "finetune_len", "finetune_learning_rate"),
    "GPU": ("scale", "dtype", "accumulate", "compile", "tokens", "vocabulary_size"),
    "evaluation": ("eval_windows", "stride", "windowed", "baseline"),
}  # fmt: skip
_METAVARS = {
    "schemes": "SCHEME", "windowed": "SCHEME", "baseline": "SCHEME", "task": "TASK", "text": "FILE",
    "out": "DIR", "sweep": "OPTION", "model": "MODULE:FUNCTION", "backend": "BACKEND",
    "device": "DEVICE", "scheduler": "ADDRESS", "tokens": "FILE", "tracker": "TRACKER",
}  # fmt: skip


def add_options(parser: Parser) -> None:
    """Add one option per field of ``Study``; a field that no page names is on the second."""
    parser.usage = "posenc compare [options]"
    parser.failed = "a run failed"
    parser.examples = (
        ("posenc compare", "the usual study, some minutes"),
        (
            "posenc compare --schemes alibi rope --steps 30 --seeds 1 --eval-lens 64 128",
            "a look, in less than a minute",
        ),
        ("posenc compare --task copy --schemes rope rope+alibi --out copying", ""),
    )
    kinds, items = typing.get_type_hints(Study), {item.name: item for item in fields(Study)}
    for name in _FIRST:
        _add_option(parser, items[name], kinds[name])
    parser.add_argument(
        "--dry-run", action="store_true",
        help="say which runs, steps, time and memory it takes; nothing is started or written",
    )  # fmt: skip
    named = {name for names in (_FIRST, *_RARE.values()) for name in names}
    others = tuple(name for name in items if name not in named)
    for title, names in {**_RARE, **({"others": others} if others else {})}.items():
        group = parser.rare(title)
        for name in names:
            _add_option(group, items[name], kinds[name])


def run(options: dict[str, Any]) -> int:
    """Run the study, or say what it would take, and return the exit status."""
    only_plan = options.pop("dry_run")
    for name in ("schemes", "windowed", "task"):
        options[name] = split(options[name]) if options[name] else ()
    for name in ("eval_lens", "train_len"):
        if options[name] is not None:
            options[name] = tuple(n for some in options[name] for n in some)
    tuples = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    study = Study(**{**options, **tuples})
    if only_plan:
        return dry_run(study)
    return terminal.compare(study)


def _add_option(parser: Any, item: Field[Any], kind: Any) -> None:
    name = f"--{item.name.replace('_', '-')}"
    if kind in (bool, bool | None):
        either = "store_true" if item.default is False else argparse.BooleanOptionalAction
        parser.add_argument(name, action=either, help=item.metadata["help"])
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
        type=integers if (many, element) == (True, int) else element,
        action=_Together if many else "store",
        nargs=("*" if usual else "+") if many else None,  # --windowed without a name: no scheme
        default=usual,
        metavar=_METAVARS.get(item.name, {int: "N", float: "X", str: "NAME"}[element]),
        help=f"{item.metadata['help']}{shown}",
    )


class _Together(argparse.Action):
    """The values of an option that is given several times are those of all of them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        given = [] if before is self.default else list(before)
        setattr(namespace, self.dest, [*given, *values])


def integers(text: str) -> list[int]:
    """The value of an option that takes integers, separated by commas too."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        message = f"accepted: integers separated by spaces or commas, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
