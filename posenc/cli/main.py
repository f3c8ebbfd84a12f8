"""``posenc compare``, ``posenc show`` and ``posenc list``."""

from __future__ import annotations

import argparse
import io
import re
import shutil
import sys
import typing
from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import posenc
from posenc.checks import check_count
from posenc.study.stopping import exit_status, sigterm_like_ctrl_c

if TYPE_CHECKING:
    from posenc.study.study import Study

_COMMANDS = {
    "compare": "train one small decoder per scheme on short text, score it on longer text",
    "show": "draw what a scheme does, as PNG, SVG or PDF",
    "list": "the catalogue of schemes; with a name: that scheme's options and defaults",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0, 1 where runs failed, 2 for bad input, 130 after Ctrl-C and 143 after SIGTERM.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # where a scheme of one's own lies, module.Class
    # Only the command asked for is imported, so that help appears at once.
    parser = _parser(next((w for w in words if not w.startswith("-")), None))
    options = vars(parser.parse_args(words))
    command = options.pop("command")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files, "±" on a plain terminal
    try:
        with sigterm_like_ctrl_c():
            return int(_RUN[command](options))
    except KeyboardInterrupt as stop:
        print(f"posenc {command}: stopped", file=sys.stderr)
        return exit_status(stop)
    except BrokenPipeError:
        return 1
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, IndexError) as error:
        print(f"posenc {command}: error: {error}", file=sys.stderr)
        return 2


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="posenc",
        description="Compare positional encodings. `posenc compare` is the main job.",
    )
    parser.add_argument("--version", action="version", version=f"posenc {posenc.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, help in _COMMANDS.items():
        sub = commands.add_parser(name, help=help, description=help)
        if name == command:
            _OPTIONS[name](sub)
    return parser


def _compare_options(parser: argparse.ArgumentParser) -> None:
    from posenc.study.study import Study

    for item in fields(Study):
        _add(parser, item, typing.get_type_hints(Study)[item.name])


def _add(parser: argparse.ArgumentParser, item: Field[Any], kind: Any) -> None:
    """One field of a dataclass as one option."""
    many = typing.get_origin(kind) is tuple
    element = typing.get_args(kind)[0] if many else kind
    given: Any = item.default
    default = " ".join(map(str, given)) if many else given
    shown = f" (default: {default})" if default not in ("", 0) else ""
    parser.add_argument(
        f"--{item.name.replace('_', '-')}",
        type=_integers if (many, element) == (True, int) else element,
        nargs=("*" if given else "+") if many else None,  # --windowed alone: none is
        default=given,
        metavar={int: "N", float: "X", str: "NAME"}[element],
        help=f"{item.metadata['help']}{shown}",
    )


def _integers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        message = f"accepted: integers apart by spaces or commas, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _compare(options: dict[str, Any]) -> int:
    from posenc.study.specs import split
    from posenc.study.study import Study
    from posenc.study.terminal import compare

    for name in ("schemes", "windowed"):
        options[name] = split(options[name]) if options[name] else ()
    options["eval_lens"] = tuple(n for some in options["eval_lens"] for n in some)
    many = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    study: Study = Study(**{**options, **many})
    return compare(study)


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scheme",
        help="a name of `posenc list`, with options as rope:base=500000, or a sum as rope+alibi",
    )
    parser.add_argument("--length", type=int, default=128, help="positions (default: 128)")
    parser.add_argument("--heads", type=int, default=8, help="heads (default: 8)")
    parser.add_argument("--head-dim", type=int, default=64, help="channels a head (default: 64)")
    parser.add_argument("--train-len", type=int, help="training length, for what depends on it")
    parser.add_argument("--out", help="ends in .png, .svg or .pdf (default: SCHEME.png)")


def _show(options: dict[str, Any]) -> int:
    from posenc.cli.show import draw
    from posenc.study.specs import parse

    label, length = options["scheme"], check_count("length", options["length"])
    heads, head_dim = options["heads"], options["head_dim"]
    layer, *others = parse(label)
    if others or layer.window is not None:
        what = "layers in turn" if others else "a window"
        raise ValueError(f"show draws one scheme, or a sum as rope+alibi; {label!r} has {what}")
    sizes = {"num_heads": heads, "head_dim": head_dim, "dim": heads * head_dim, "max_len": length}
    if options["train_len"] is not None:
        sizes["train_len"] = options["train_len"]
    scheme = layer.make(**sizes)
    print(draw(scheme, options["out"] or f"{_plain(label)}.png", length=length, title=label))
    return 0


def _plain(label: str) -> str:
    return re.sub(r"[\W_]+", "-", label.lower())


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scheme", nargs="*", help="a name of the catalogue, or module.Class")


def _list(options: dict[str, Any]) -> int:
    from posenc.cli.list import page, rows, table

    width = min(100, shutil.get_terminal_size().columns)  # 80 where there is no terminal
    if options["scheme"]:
        print("\n\n".join(page(name, width) for name in options["scheme"]))
    else:
        print(f"{table(rows(), width)}\n\n`posenc list NAME` shows the options of one.")
    return 0


_OPTIONS = {"compare": _compare_options, "show": _show_options, "list": _list_options}
_RUN = {"compare": _compare, "show": _show, "list": _list}
