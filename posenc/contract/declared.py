"""Classes that say facts about themselves in their first line, with fields that check themselves.

``class ALiBi(PositionScheme, relative=True)``
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_origin

from posenc.contract.checks import nearest
from posenc.contract.fields import Check, check_fields, checks_of


class Declared:
    """Base of classes that take facts as class keywords; subclasses are frozen dataclasses.

    A fact becomes an attribute of the class, and its subclasses inherit it. A ``paper`` ends the
    docstring too. Fields are checked as annotated (``posenc.contract.fields``)
    before ``__post_init__``.
    """

    _FACTS: ClassVar[Mapping[str, type]] = {}
    _checks: ClassVar[Mapping[str, Check | None]] = {}

    def __init_subclass__(cls, **facts: Any) -> None:
        super().__init_subclass__()
        for name, value in facts.items():
            if name not in cls._FACTS:
                accepted = nearest(name, cls._FACTS)
                raise TypeError(f"class {cls.__name__}: unknown {name}={value!r}{accepted}")
            kind = cls._FACTS[name]
            if not isinstance(value, kind):
                raise TypeError(
                    f"class {cls.__name__}: {name} must be {kind.__name__}, got {value!r}"
                )
            setattr(cls, name, value)
        own = {} if "_FACTS" in vars(cls) else inspect.get_annotations(cls)
        for name, annotation in own.items():
            if name in cls._FACTS and name != "axes" and not _is_class_var(annotation):
                raise TypeError(
                    f"class {cls.__name__}: {name} is written as a field, and is a fact of the "
                    f"class: class {cls.__name__}(..., {name}=...)"
                )
        cls._checks = {**cls._checks, **checks_of(cls)}
        if "paper" in facts and cls.__doc__:
            # Without the indentation of the source, which Python 3.13 removes and others keep.
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\n{facts['paper']}.\n"
        if "__post_init__" in vars(cls):
            cls.__post_init__ = _after_checks(vars(cls)["__post_init__"])  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_fields(self, self._checks)

    def _declare(self, **facts: Any) -> None:
        """Set facts that follow from the fields of this instance."""
        for name, value in facts.items():
            object.__setattr__(self, name, value)


def _is_class_var(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.removeprefix("typing.").startswith("ClassVar")
    return annotation is ClassVar or get_origin(annotation) is ClassVar


def _after_checks(post_init: Callable[..., None]) -> Callable[..., None]:
    """``post_init``, called after the fields are checked."""

    @functools.wraps(post_init)
    def check_then_init(self: Any, *args: Any) -> None:
        check_fields(self, self._checks)
        post_init(self, *args)

    return check_then_init
