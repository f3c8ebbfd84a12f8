"""``posenc completion``: a script that completes commands, options and their values in a shell.

It is made from the parsers, once: pressing Tab starts no Python. Names of schemes and tasks are
those that were installed then.

shtab, a library for this, completes whole words: labels such as ``rope+alibi`` would need functions
of ours in each shell all the same, and users a package more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posenc.cli.parser import Parser

# What a metavar stands for; other metavars have values that only the user knows.
_FILES, _FOLDERS = ("FILE", "MODEL", "CONFIG"), ("DIR",)
_BACKENDS, _DEVICES = ("auto", "jax", "torch"), ("auto", "cpu", "cuda")


def add_options(parser: Parser) -> None:
    """Add the options of ``posenc completion``."""
    parser.usage = "posenc completion {bash,zsh,fish}"
    parser.examples = (
        ('eval "$(posenc completion bash)"', "in ~/.bashrc"),
        ('eval "$(posenc completion zsh)"', "in ~/.zshrc, after compinit"),
        ("posenc completion fish > ~/.config/fish/completions/posenc.fish", ""),
    )
    parser.add_argument("shell", choices=_SCRIPTS, help="the shell that reads the script")


def run(options: dict[str, Any]) -> int:
    """Print the script and return the exit status 0."""
    from posenc.cli.main import COMMANDS, parsers_of

    commands = [Command.of(name, parser) for name, parser in parsers_of(tuple(COMMANDS))[1].items()]
    print(_SCRIPTS[options["shell"]](commands, COMMANDS), end="")
    return 0


@dataclass(frozen=True)
class Value:
    """An option, or with no names what stands without one: its help, and what completes it.

    ``takes`` is the number of values: 0, 1, or ``many``. ``words`` are all values there are, or
    ``"FILE"`` or ``"DIR"``; none, if only the user knows them.
    """

    names: tuple[str, ...]
    takes: str
    words: tuple[str, ...] | str
    help: str


@dataclass(frozen=True)
class Command:
    """A command and what can follow it."""

    name: str
    options: tuple[Value, ...]
    argument: Value | None

    @classmethod
    def of(cls, name: str, parser: argparse.ArgumentParser) -> Command:
        """What a parser accepts; no command has two kinds of arguments."""
        values = [_value(action) for action in parser._actions]
        arguments = [value for value in values if not value.names]
        options = tuple(value for value in values if value.names)
        return cls(name, options, arguments[0] if arguments else None)

    @property
    def names(self) -> list[str]:
        """All options."""
        return [name for option in self.options for name in option.names]


def _value(action: argparse.Action) -> Value:
    metavar = str(action.metavar)
    takes = "1" if action.nargs is None else "0" if action.nargs == 0 else "many"
    words: tuple[str, ...] | str = ()
    if action.choices is not None:
        words = tuple(map(str, action.choices))
    elif metavar in _FILES:
        words = "FILE"
    elif metavar in _FOLDERS:
        words = "DIR"
    elif (names := _names().get(metavar)) is not None:
        words = names
    text = "every option in full" if action.help == argparse.SUPPRESS else action.help or ""
    return Value(tuple(action.option_strings), takes, words, text.partition("; ")[0])


def _names() -> dict[str, tuple[str, ...]]:
    from posenc.makers import catalogue
    from posenc.presets import PLANS
    from posenc.study.tasks.catalogue import task_classes

    schemes, tasks = sorted({*catalogue(), *PLANS}), sorted(task_classes())
    return {
        "SCHEME": tuple(schemes),
        "TASK": (*tasks, "all"),
        "NAME": tuple(sorted({*schemes, *tasks})),
        "BACKEND": _BACKENDS,
        "DEVICE": _DEVICES,
    }


# For bash and zsh: $word goes over the words before the one that is completed.
_WALK = """\
  local word command= option= count=0 want=FILE part prefix=
  for word in "${before[@]}"; do
    if [[ -z $command ]]; then
      if [[ $word != -* ]]; then command=$word; fi
    elif [[ $word == -* ]]; then option=${word%%=*}; count=0
    elif [[ $word != "=" ]]; then count=$((count + 1))
    fi
  done
  if [[ $cur == --*=* ]]; then option=${cur%%=*}; count=0; prefix="$option="; cur=${cur#*=}; fi
  case "$command $option $count" in
@CASES@
  esac
  if [[ -z $prefix && $cur == -* ]]; then
    case $command in
@OPTIONS@
    esac
  fi
"""

_BASH = """\
# posenc: completion for bash. In ~/.bashrc: eval "$(posenc completion bash)"
_posenc() {
  local cur=${COMP_WORDS[COMP_CWORD]} last=${COMP_WORDS[COMP_CWORD-1]}
  local before=("${COMP_WORDS[@]:1:COMP_CWORD-1}")
  COMPREPLY=()
  if [[ $cur == ":" || $last == ":" ]]; then return; fi  # an option of a scheme
  if [[ $cur == "=" ]]; then cur=; fi
@WALK@
  if [[ $prefix == --* ]]; then prefix=; fi  # bash takes what follows "=" as a word
  case $want in
    FILE) compopt -o filenames 2>/dev/null; part=$(compgen -f -- "$cur") ;;
    DIR) compopt -o filenames 2>/dev/null; part=$(compgen -d -- "$cur") ;;
    *)
      prefix=${cur%"${cur##*[+/~,]}"}  # of labels as rope+alibi
      part=$(compgen -P "$prefix" -W "$want" -- "${cur##*[+/~,]}")
  esac
  while IFS= read -r word; do
    if [[ -n $word ]]; then COMPREPLY+=("$word"); fi
  done <<< "$part"
}
complete -F _posenc posenc
"""

_ZSH = """\
#compdef posenc
# posenc: completion for zsh. In ~/.zshrc, after compinit: eval "$(posenc completion zsh)"
_posenc() {
  local cur=${words[CURRENT]}
  local -a before
  before=("${(@)words[2,CURRENT-1]}")
@WALK@
  case $want in
    FILE) [[ -n $prefix ]] && compset -P '*='; _files ;;
    DIR) [[ -n $prefix ]] && compset -P '*='; _files -/ ;;
    *)
      compset -P '*[=+/~,]'
      compadd -- ${=want} ;;
  esac
}
if [[ $funcstack[1] == _posenc ]]; then _posenc; else compdef _posenc posenc; fi
"""


def _for_bash_and_zsh(template: str) -> Callable[[Sequence[Command], dict[str, str]], str]:
    def script(commands: Sequence[Command], told: dict[str, str]) -> str:
        first = " ".join([*told, "--help", "--version"])
        cases = [f'    " "*) want="{first}" ;;', *(c for each in commands for c in _cases(each))]
        options = [f'      {each.name}) want="{" ".join(each.names)}" ;;' for each in commands]
        walk = _WALK.replace("@CASES@", "\n".join(cases)).replace("@OPTIONS@", "\n".join(options))
        return template.replace("@WALK@", walk.rstrip())

    return script


def _cases(command: Command) -> Iterator[str]:
    """Cases of "command option count": values of an option, else the argument, else options."""
    alike: dict[str, list[str]] = {}
    for option in command.options:
        if option.takes != "0":
            count = "0" if option.takes == "1" else "*"
            patterns = [f'"{command.name} {name} "{count}' for name in option.names]
            alike.setdefault(_wanted(option), []).extend(patterns)
    for wanted, patterns in alike.items():
        yield f'    {"|".join(patterns)}) want="{wanted}" ;;'
    wanted = " ".join(command.names) if command.argument is None else _wanted(command.argument)
    yield f'    "{command.name} "*) want="{wanted}" ;;'


def _wanted(value: Value) -> str:
    return value.words if isinstance(value.words, str) else " ".join(value.words)


def _for_fish(commands: Sequence[Command], told: dict[str, str]) -> str:
    lines = [
        "# posenc: completion for fish. Save as ~/.config/fish/completions/posenc.fish",
        "complete -c posenc -f",
        "complete -c posenc -n __fish_use_subcommand -l help -d 'show the commands'",
        "complete -c posenc -n __fish_use_subcommand -l version -d 'show the version'",
    ]
    for name, help in told.items():
        start = f"complete -c posenc -n __fish_use_subcommand -a {name}"
        lines.append(f"{start} -d {_quoted(help)}")
    for command in commands:
        start = f"complete -c posenc -n '__fish_seen_subcommand_from {command.name}'"
        if command.argument is not None:
            lines.append(f"{start} {_fish_values(command.argument, '-a')}")
        for option in command.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            values = "" if option.takes == "0" else f" {_fish_values(option, '-xa')}"
            lines.append(f"{start} {names}{values} -d {_quoted(option.help)}")
    return "\n".join(lines) + "\n"


def _fish_values(value: Value, flag: str) -> str:
    if value.words == "FILE":
        return "-F" if flag == "-a" else "-rF"
    if value.words == "DIR":
        return f"{flag} '(__fish_complete_directories)'"
    return f"{flag} {_quoted(_wanted(value))}" if value.words else "-x" * (flag == "-xa")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {
    "bash": _for_bash_and_zsh(_BASH),
    "zsh": _for_bash_and_zsh(_ZSH),
    "fish": _for_fish,
}
