"""Mask functions with the variables that they read now, and masks that no program can be kept for.

The backward pass of a traced program calls a mask function again, when a loop that made it has gone
on. Its closure would then have the loop's last values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from jax.core import Tracer

from posenc.backend import Mask

# A new function compiles again, so one that reads the same values has one copy.
_COPIES: WeakKeyDictionary[Any, tuple[tuple[Any, ...], FunctionType]] = WeakKeyDictionary()


def as_of_now(mask: Any) -> Any:
    """A mask, or what stands for one, whose functions keep the values of their closures."""
    if isinstance(mask, FunctionType):
        return _copy(mask)
    if not isinstance(mask, Mask):
        return mask
    own = getattr(mask, "function", None)
    if isinstance(own, FunctionType) and (copy := _copy(own)) is not own:
        mask = replace(mask, function=copy)
    parts = tuple(as_of_now(part) for part in mask.parts)
    changed = any(new is not old for new, old in zip(parts, mask.parts, strict=True))
    return replace(mask, parts=parts) if changed else mask


def _copy(function: FunctionType) -> FunctionType:
    """The function with cells of its own; itself if it has no closure, or an empty one."""
    try:
        values = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a variable without a value
        return function
    if not values:
        return function
    known = _COPIES.get(function)
    if known is not None and all(a is b for a, b in zip(known[0], values, strict=True)):
        return known[1]
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        tuple(CellType(value) for value in values),
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    _COPIES[function] = values, copy
    return copy


def why_not_static(mask: Mask) -> str | None:
    """Why a program cannot be told apart from others by a mask; None if it can."""
    for part in mask.parts:
        if any(isinstance(value, Tracer) for value in _values(part)):
            return (
                "the mask reads a traced value, which the backward pass over tiles does not get: "
                "give a number that Python knows, or booleans as mask="
            )
        try:
            hash(part)
        except TypeError as error:
            return (
                f"compiled programs are found by the mask, and {type(part).__name__} is not "
                f"hashable ({error}): give it tuples for arrays, or booleans as mask="
            )
    return None


def _values(of: Any) -> Iterator[Any]:
    """What a mask or a function reads: fields, closures, defaults, and what these read."""
    waiting, seen = [of], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, Mask):
            waiting += [getattr(value, each.name) for each in fields(value)]
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            waiting += [value.__func__, value.__self__]
        elif isinstance(value, FunctionType):
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
        elif isinstance(value, tuple | list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()


def _is_set(cell: CellType) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
