"""Schemes as values of JSON, for the configuration of a layer in a ``.keras`` file."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields, is_dataclass
from typing import Any

_CLASS, _FIELDS = "class", "fields"


def to_json(value: Any) -> Any:
    """A scheme, or a field of one, as values of JSON: ``{"class": ..., "fields": {...}}``.

    Raises
    ------
    TypeError
        A field holds what JSON has not, as a function.
    """
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        own = {f.name: to_json(getattr(value, f.name)) for f in fields(value) if f.init}
        return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", _FIELDS: own}
    if isinstance(value, tuple | list):
        return [to_json(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a scheme that is saved holds numbers, strings and schemes, got {value!r}")


def from_json(value: Any) -> Any:
    """The scheme, or the field of one, that ``to_json`` wrote.

    A file may name any class, so only modules of posenc are imported: a scheme of one's own must
    be imported before a file with it is loaded.

    Raises
    ------
    ValueError
        A class is not found, or is no dataclass.
    """
    if isinstance(value, list):
        return tuple(from_json(each) for each in value)
    if not isinstance(value, dict):
        return value
    module, _, name = value[_CLASS].partition(":")
    if module.partition(".")[0] == "posenc":
        importlib.import_module(module)
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(
            f"the file has a scheme {name} of {module}, which is not imported: import {module} "
            "before keras.saving.load_model"
        )
    return kind(**{name: from_json(each) for name, each in value[_FIELDS].items()})
