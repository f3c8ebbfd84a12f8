"""Fields of a scheme that check themselves: ``num_heads: Count``.

The check of a field follows from its annotation, as the module reads it where the class is made,
and runs before ``__post_init__``. An optional field, ``Count | None``, may be None.

===================  ====================================
annotation           accepts
===================  ====================================
``Count``            an integer of at least 1
``Distance``         an integer from 1 to ``2**30``
``Positive``         a finite number above 0
``Finite``           a finite number
``bool``             True or False
``Literal[...]``     one of its values
``PositionScheme``   an instance of a scheme
===================  ====================================

Fields with other annotations are not checked.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from posenc.contract.checks import (
    check_choice,
    check_count,
    check_distance,
    check_finite,
    check_flag,
    check_positive,
    python_number,
)

Check = Callable[[str, Any], Any]

Count = Annotated[int, check_count]
Distance = Annotated[int, check_distance]
Positive = Annotated[float, check_positive]
Finite = Annotated[float, check_finite]


def checks_of(kind: type) -> dict[str, Check | None]:
    """The checks of the fields that a class annotates itself, by name; None for no check."""
    scope = getattr(sys.modules.get(kind.__module__), "__dict__", {})  # none if typed in
    return {name: _check_of(_read(a, scope)) for name, a in inspect.get_annotations(kind).items()}


def check_fields(instance: Any, checks: Mapping[str, Check | None]) -> None:
    """Check the fields of a dataclass, with their NumPy numbers as Python numbers.

    Raises
    ------
    TypeError, ValueError
        A value is not as annotated; the message has the field, its value and what is accepted.
    """
    # NumPy integers overflow in thresholds and table sizes, yet hash like Python's in caches.
    for field in fields(instance) if is_dataclass(instance) else ():
        if field.init:
            value = python_number(getattr(instance, field.name))
            object.__setattr__(instance, field.name, value)
            check = checks.get(field.name)
            if check is not None:
                check(field.name, value)


def check_equality(name: str, value: Any) -> None:
    """Refuse a scheme or mask that equals another one although their fields differ.

    Compiled programs and passes are found by it, and would serve the other one too. Values that it
    holds are checked with it.

    Raises
    ------
    TypeError
        The field that equality does not see, and how it would.
    """
    if isinstance(value, tuple):
        for each in value:
            check_equality(name, each)
    if not is_dataclass(value) or isinstance(value, type):
        return
    kind = type(value)
    # With eq=False equality is that of a base class, which knows no further field.
    base = next(base for base in kind.__mro__ if "__eq__" in vars(base))
    if "__dataclass_fields__" in vars(base):
        compared = {each.name for each in fields(base) if each.compare}
        unseen = [each.name for each in fields(kind) if each.init and each.name not in compared]
        if unseen:
            raise TypeError(
                f"{name}: two {kind.__name__} that differ in {unseen[0]!r} alone are equal, and "
                "calls would mix them up; leave out eq=False and compare=False, or define __eq__ "
                "and __hash__"
            )
    for each in fields(value):
        check_equality(name, getattr(value, each.name, None))


def _read(annotation: Any, scope: dict[str, Any]) -> Any:
    """An annotation as a type; None if its text says nothing in its module."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, scope)
    except (NameError, AttributeError, TypeError, KeyError):
        return None


def _check_of(annotation: Any) -> Check | None:
    """The check of an annotation; None for no check."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        others = [argument for argument in arguments if argument is not type(None)]
        check = _check_of(others[0]) if len(others) == 1 < len(arguments) else None
        return None if check is None else partial(_check_given, check)
    if origin is Annotated:
        return next((data for data in annotation.__metadata__ if callable(data)), None)
    if origin is Literal:
        return partial(_check_literal, arguments)
    if annotation is bool:
        return check_flag
    found: Check | None = getattr(annotation, "_check_field", None)
    return found


def _check_given(check: Check, name: str, value: Any) -> None:
    if value is not None:
        check(name, value)


def _check_literal(accepted: tuple[Any, ...], name: str, value: Any) -> None:
    check_choice(name, value, accepted)
