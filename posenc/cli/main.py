"""The command ``posenc``: its parser, errors and exit status. Each command is a module here."""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import posenc
from posenc.cli.parser import Parser, nearest_word

COMMANDS = {
    "compare": "train a decoder per scheme on short text or a task, score it on longer",
    "report": "join studies of several machines into one report",
    "probe": "a model on disk by length, also under other schemes",
    "audit": "libraries, functions and configurations against the definition",
    "vectors": "golden vectors of each scheme, for other languages",
    "show": "draw a scheme to PNG, SVG or PDF; print examples of a task",
    "rope": "what the RoPE of a checkpoint's config.json really is",
    "list": "schemes and tasks; with a name, its options and defaults",
    "completion": "print a script that completes commands in bash, zsh or fish",
}
# What `posenc` alone says.
GREETING = """\
posenc compares positional encodings: ALiBi, RoPE, T5 and almost fifty others.
  posenc list             schemes and tasks; of one, as rope, its options
  posenc show alibi       draw what a scheme does to attention, to alibi.png
  posenc compare          train a decoder per scheme, score it on longer text
  posenc probe FOLDER     the same question to a trained model of yours
  posenc audit            is a kernel, or a library, the scheme that it says?
In seconds: posenc list rope; posenc show alibi. Completion: posenc completion.
All commands: posenc --help. The options of one: posenc COMMAND --help."""
_BAD, _CTRL_C, _PIPE = 2, 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as a shell reports them


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: done. 1: what was checked failed. 2: no result, by wrong use, a missing file or package, or
    an error of posenc itself. 130: Ctrl-C. 143: SIGTERM. 141: nobody reads on.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(GREETING, file=sys.stderr)
        return _BAD
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # so that module.Class is found in the current folder
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for "±" on a plain terminal
    try:
        status = _run(words)
        sys.stdout.flush()
    except KeyboardInterrupt:  # before a command began
        print("posenc: stopped", file=sys.stderr)
        return _CTRL_C
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to write goes nowhere
        return _PIPE
    return status


def _run(words: Sequence[str]) -> int:
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        meant = nearest_word(command, COMMANDS)
        print(
            f"posenc: error: unknown command {command!r}{meant}; accepted: {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return _BAD
    parser, parsers = parsers_of(() if command is None else (command,))
    if command is None and words[0].partition("=")[0] not in parser._option_string_actions:
        parser.error(parser.unknown(words))
    known, unknown = parser.parse_known_args(words)
    options = vars(known)
    command = options.pop("command")
    own = parsers[command]
    if unknown:
        own.error(own.unknown(unknown))
    from posenc.study.stopping import exit_status, sigterm_like_ctrl_c

    try:
        with sigterm_like_ctrl_c():
            return int(_module(command).run(options))
    except KeyboardInterrupt as stop:
        print(f"posenc {command}: stopped", file=sys.stderr)
        return exit_status(stop)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, IndexError) as error:
        message = re.sub(r"\A\[Errno \d+\] ", "", str(error)) or type(error).__name__
        print(f"posenc {command}: error: {own.named_as_option(message)}", file=sys.stderr)
    except Exception:  # status 1 would say that a check failed
        traceback.print_exc()
        print(f"posenc {command}: this is an error of posenc; please report it", file=sys.stderr)
    return _BAD


def parsers_of(commands: Sequence[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of the commands; only those that are given have their options."""
    parser = Parser(prog="posenc", usage="posenc COMMAND ...")
    parser.description = f"posenc {posenc.__version__}: compare positional encodings."
    parser.add_argument(
        "--version", action="version", version=f"posenc {posenc.__version__}",
        help="show the version and exit",
    )  # fmt: skip
    parser.examples = (
        ("posenc list rope", "the options of RoPE"),
        ("posenc show alibi", "draws alibi.png"),
        ("posenc compare --help", "the options of a command"),
    )
    parser.failed = "what was checked failed"
    subs = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", prog="posenc"
    )
    own = {}
    for name, help in COMMANDS.items():
        own[name] = subs.add_parser(name, help=help, description=f"{help[:1].upper()}{help[1:]}.")
        if name in commands:
            _module(name).add_options(own[name])
            own[name].with_second_page()
    return parser, own


def _module(command: str) -> Any:
    """The command's module; others are not imported, so that help appears at once."""
    return importlib.import_module(f"posenc.cli.{command}")
