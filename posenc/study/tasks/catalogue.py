"""Tasks by their names, and by labels with options: ``passkey:shared=True``."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from posenc.contract.checks import nearest
from posenc.study.specs import Part, parse
from posenc.study.tasks.task import KINDS, Task

TEXT = "text"
ALL = "all"  # the label that stands for every task
_GROUP = "posenc.tasks"
_BUILT_IN = {
    "association": "Association",
    "copy": "Copy",
    "flip_flop": "FlipFlop",
    "frequent_words": "FrequentWords",
    "indirect_indexing": "IndirectIndexing",
    "last_value": "LastValue",
    "majority": "Majority",
    "mqar": "MQAR",
    "parity": "Parity",
    "passkey": "Passkey",
    "repeat_copy": "RepeatCopy",
    "reverse": "Reverse",
    "sort": "Sort",
    "state_tracking": "StateTracking",
    TEXT: "Text",
    "variable_tracking": "VariableTracking",
}
_ALSO = ("passkey:shared=True", "state_tracking:things=3")  # another form, which ranks otherwise


def task_classes() -> dict[str, type[Task]]:
    """The classes of all tasks by name: those of posenc, and of other packages' entry points.

    An entry point of the group ``posenc.tasks`` that cannot be loaded, or whose name is taken,
    gives a warning.
    """
    found = {name: _built_in(name) for name in _BUILT_IN}
    for entry in entry_points(group=_GROUP):
        if entry.name in found:
            warnings.warn(f"{_GROUP}: {entry.value} takes the name {entry.name!r}", stacklevel=2)
            continue
        try:
            found[entry.name] = _checked(entry.load(), entry.name)
        except Exception as error:
            warnings.warn(f"{_GROUP}: cannot load {entry.value}: {error!r}", stacklevel=2)
    return found


def expand(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels with ``all`` replaced by those of all tasks that are not given."""
    given = tuple(labels)
    every = [*task_classes(), *_ALSO] if ALL in given else []
    found = (([label], [n for n in every if n not in given])[label == ALL] for label in given)
    return tuple(label for some in found for label in some)


@functools.lru_cache(maxsize=64)
def make_task(label: str) -> Task:
    """The task of a label: a name, or ``module.Class``, with options after a colon.

    Raises
    ------
    ValueError, TypeError
        There is no such task, option or value.
    """
    part = _part(label)
    kind = task_class(part.name)
    known = kind.options()
    for option, _ in part.options:
        if option not in known:
            raise ValueError(f"task {part.name!r} has no option {option!r}{nearest(option, known)}")
    return kind(**dict(part.options))


def task_class(name: str) -> type[Task]:
    """The class of a name, or of a dotted name, ``module.Class``."""
    if name in _BUILT_IN:
        return _built_in(name)
    names = task_classes()
    if name in names:
        return names[name]
    if "." not in name or not all(name.split(".")):
        hint = nearest(name, [*names, ALL], listing="`posenc list`")
        raise ValueError(f"unknown task {name!r}{hint}; your own is a dotted name, module.Class")
    return _checked(imported(name), name)


def imported(name: str) -> Any:
    """What a dotted name, ``module.Class``, stands for, be it a task or not."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"unknown task {name!r}: {error}") from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ImportError(f"task {name!r}: cannot import {module!r}: {cause}") from error


def _part(label: str) -> Part:
    try:
        (layer,) = parse(label)
        (part,) = layer.parts if layer.window is None else ()
    except ValueError:
        accepted = "name or name:option=value,option=value"
        raise ValueError(f"task {label!r}: accepted: {accepted}") from None
    return part


def _built_in(name: str) -> type[Task]:
    module = importlib.import_module(f"posenc.study.tasks.{name}")
    found: type[Task] = getattr(module, _BUILT_IN[name])
    return found


def _checked(value: Any, name: str) -> type[Task]:
    """The class, if it is one of a task."""
    if not isinstance(value, type) or not issubclass(value, Task):
        raise TypeError(f"task {name!r} is no class that inherits posenc.study.Task: {value!r}")
    # Its own: without the decorator, fields of the class would be no options.
    if not getattr(vars(value).get("__dataclass_params__"), "frozen", False):
        advice = f"write @dataclass(frozen=True) above class {value.__name__}"
        raise TypeError(f"task {name!r}: class {value.__name__} is no frozen dataclass; {advice}")
    if value.kind not in KINDS:
        raise ValueError(f"task {name!r}: kind must be one of {KINDS}, got {value.kind!r}")
    return value
