"""The command ``posenc``: its parser, errors and exit status. Each command is a module here."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import posenc
from posenc.study.stopping import exit_status, sigterm_like_ctrl_c

_COMMANDS = {
    "compare": "train a small decoder per scheme on short text or a task, score it on longer ones",
    "probe": "loss, passkeys and attention by length of a model on disk, also under other schemes",
    "audit": "what libraries, functions and configurations compute, against the definition",
    "vectors": "golden vectors of each scheme as safetensors and JSON, for other languages",
    "show": "draw what a scheme does, as PNG, SVG or PDF; print examples of a task",
    "rope": "what the RoPE of a checkpoint's config.json really is",
    "list": "schemes and tasks; with a name: the options of that one, and their defaults",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0, 1 if runs failed or an audit found a difference, 2 for bad input, 130 after Ctrl-C and 143
    after SIGTERM.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # so that module.Class is found in the current folder
    parser, own = _parsers(next((w for w in words if not w.startswith("-")), None))
    known, unknown = parser.parse_known_args(words)
    if unknown:
        own.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown[0], own)}")
    options = vars(known)
    command = options.pop("command")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for "±" on a plain terminal
    try:
        with sigterm_like_ctrl_c():
            return int(_module(command).run(options))
    except KeyboardInterrupt as stop:
        print(f"posenc {command}: stopped", file=sys.stderr)
        return exit_status(stop)
    except BrokenPipeError:
        return 1
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, IndexError) as error:
        print(f"posenc {command}: error: {error}", file=sys.stderr)
        return 2


def _parsers(
    command: str | None,
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser, and that of the given command, which alone gets its options."""
    parser = argparse.ArgumentParser(
        prog="posenc",
        description="Compare positional encodings. `posenc compare` is the main command.",
    )
    parser.add_argument("--version", action="version", version=f"posenc {posenc.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    own = parser
    for name, help in _COMMANDS.items():
        sub = commands.add_parser(name, help=help, description=help)
        if name == command:
            own = sub
            _module(name).add_options(sub)
    return parser, own


def _meant(word: str, parser: argparse.ArgumentParser) -> str:
    """A guess at the option that an unknown one stands for, also by its initials: ``--lr``."""
    options = [o for action in parser._actions for o in action.option_strings]
    name = word.partition("=")[0]
    close = [o for o in options if "".join(w[:1] for w in o.split("-")) == name.lstrip("-")]
    close += difflib.get_close_matches(name, options, n=1)
    return f" (did you mean {close[0]}?)" if close and name.startswith("-") else ""


def _module(command: str) -> Any:
    """The command's module; others are not imported, so that help appears at once."""
    return importlib.import_module(f"posenc.cli.{command}")
