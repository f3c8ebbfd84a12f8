"""Mask functions with the variables that they read now.

The backward pass of a traced program calls a mask function again, when a loop that made it has gone
on. Its closure would then have the loop's last values.
"""

from __future__ import annotations

from dataclasses import replace
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

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
