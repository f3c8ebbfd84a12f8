"""The parser of a command: its help fits a screen, and ``--help-all`` has every option in full.

A first page holds the options that most need, each up to its first semicolon. A command puts the
others into groups of ``Parser.rare``.

A metavar is one word for one kind of value, which completion offers too: ``SCHEME``, ``TASK``,
``NAME`` (either of them), ``FILE``, ``DIR``.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

_WIDTH = 80
_HELP_COLUMN = 25
_EXAMPLE = 42  # columns of an example's command, if its meaning stands beside it
EXIT_STATUS = "0 done, 1 {failed}, 2 wrong use or no result, 130 after Ctrl-C"


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` with two pages of help; unknown options are told what they may mean.

    Attributes
    ----------
    examples
        Pairs of a command and what it does.
    failed
        What exit status 1 means; empty if the command has none.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, "add_help": False, **keywords})
        self.examples: Sequence[tuple[str, str]] = ()
        self.failed = ""
        self._rare: list[Any] = []
        self.add_argument("-h", "--help", action="help", help="show this page and exit")

    def with_second_page(self) -> None:
        """Offer ``--help-all``; after all other options, because it is the last that is read."""
        self.add_argument("--help-all", action=_HelpAll, help=argparse.SUPPRESS)

    def rare(self, title: str) -> Any:
        """A group of options that only ``--help-all`` shows."""
        group = self.add_argument_group(title)
        self._rare.append(group)
        return group

    def format_help(self) -> str:
        """The first page."""
        page = copy.copy(self)
        page._action_groups = [
            _shortened(group) for group in self._action_groups if group not in self._rare
        ]
        text = argparse.ArgumentParser.format_help(page)
        if "--help-all" in self._option_string_actions and text != super().format_help():
            titles = "".join(f", {group.title}" for group in self._rare)
            text += _paragraph(f"In full{titles and ', and '}{titles[2:]}: {self.prog} --help-all")
        return text + self._end()

    def format_all(self) -> str:
        """The second page: every option and its whole text."""
        return super().format_help() + self._end()

    def _end(self) -> str:
        """Examples, and what the exit status says."""
        if not self.examples:
            return ""
        lines = ["", "examples:"]
        for command, meaning in self.examples:
            line = f"  {command}"
            fits = len(line) <= _EXAMPLE and len(meaning) <= _WIDTH - _EXAMPLE - 3
            below = [line, f"      {meaning}"] if meaning else [line]
            lines += [f"{line:<{_EXAMPLE}}  {meaning}".rstrip()] if fits else below
        status = EXIT_STATUS.format(failed=self.failed)
        status = status if self.failed else status.replace("1 , ", "")
        return "\n".join(lines) + "\n" + _paragraph(f"Exit status: {status}.")

    def unknown(self, words: Sequence[str]) -> str:
        """An error about words that no option takes, with a guess at what the first one means."""
        name = words[0].partition("=")[0]
        options = [o for action in self._actions for o in action.option_strings]
        # Also by its initials: ``--lr``.
        close = [o for o in options if "".join(w[:1] for w in o.split("-")) == name.lstrip("-")]
        close += difflib.get_close_matches(name, options, n=1)
        meant = f" (did you mean {close[0]}?)" if close and name.startswith("-") else ""
        return f"unrecognized arguments: {' '.join(words)}{meant}"

    def named_as_option(self, message: str) -> str:
        """An error about a value that starts with the option's name in Python, as a user knows it.

        ``eval_lens must be ...`` is ``--eval-lens must be ...``.
        """
        first = "".join(re.findall(r"\A\w+\b(?!:\S)", message))
        for action in self._actions:
            if action.option_strings and first == action.dest:
                return f"{action.option_strings[-1]}{message[len(first) :]}"
        return message

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        kinds: dict[Any, str] = {int: "an integer", float: "a number"}
        kind = kinds.get(action.type)
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if kind is None:
                raise
            raise argparse.ArgumentError(action, f"accepted: {kind}, got {arg_string!r}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            message = f"accepted: {', '.join(known)}, got {value!r}{nearest_word(value, known)}"
            raise argparse.ArgumentError(action, message)


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        none = argparse.SUPPRESS
        super().__init__(option_strings, dest=none, nargs=0, default=none, help=help)

    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.format_all(), end="")
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """Narrow enough for a terminal of 80 columns; several values are ``N ...``."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size().columns) - 1
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=max(40, width))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        (name,) = self._metavar_formatter(action, default_metavar)(1)
        several = {argparse.ONE_OR_MORE: f"{name} ...", argparse.ZERO_OR_MORE: f"[{name} ...]"}
        if isinstance(action.nargs, str) and action.nargs in several:
            return several[action.nargs]
        return super()._format_args(action, default_metavar)


def _shortened(group: Any) -> Any:
    """A group whose options are told up to the first semicolon, and their defaults."""
    short = copy.copy(group)
    short._group_actions = []
    for action in group._group_actions:
        if action.help == argparse.SUPPRESS:
            continue
        one = copy.copy(action)
        first, more, _ = str(action.help or "").partition("; ")
        default = re.search(r" \(default: [^)]*\)$", str(action.help or ""))
        one.help = f"{first}{default.group() if more and default else ''}"
        short._group_actions.append(one)
    return short


def _paragraph(text: str) -> str:
    return "\n" + "\n".join(textwrap.wrap(text, _WIDTH - 1, break_on_hyphens=False)) + "\n"


def nearest_word(word: str, known: Iterable[str]) -> str:
    """A question whether the nearest known word was meant, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
