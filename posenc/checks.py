"""Arguments checked where they enter: an error names the argument, the value, what is accepted."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

import numpy as np


def python_number(value: Any) -> Any:
    """A NumPy scalar, or another library's integer, as Python's own number; all else as it is.

    A tuple becomes one of such numbers.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is tuple:
        return tuple(map(python_number, value))
    if isinstance(value, int) or not hasattr(value, "__index__"):
        return value
    try:
        return operator.index(value)
    except TypeError:  # an array of floats, or of many
        return value


def python_fields(made: Any) -> None:
    """The numbers that a dataclass was made with, as Python's own, also where it is frozen."""
    # NumPy's integers overflow in thresholds and table sizes, and hash like Python's in caches.
    for each in fields(made) if is_dataclass(made) else ():
        if each.init:
            object.__setattr__(made, each.name, python_number(getattr(made, each.name)))


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """``value`` as an int of at least ``least``; a bool or a float is a ``TypeError``."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        # An index is a constant to torch's compiler, and a new one compiled anew.
        count = value if type(value) is int else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return count


def check_positive(name: str, value: Any) -> float:
    """``value`` as a finite float above zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number: Any = value
    if not 0 < number < math.inf:  # torch's compiler knows no isfinite of a symbol
        raise ValueError(f"{name} must be finite and greater than 0, got {value!r}")
    return float(number)


def check_flag(name: str, value: Any) -> bool:
    """``value`` as a bool; anything else, ``"False"`` among it, is a ``TypeError``."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_window(value: Any) -> tuple[int | None, int | None] | None:
    """A window as ``(left, right)``: how far back and ahead a query sees; None for no bound.

    A width ``W`` is ``(W - 1, W - 1)``. None: no window.
    """
    if value is None:
        return None
    if not isinstance(value, tuple | list):
        width = check_count("window", value)
        left, right = _bound(width - 1), _bound(width - 1)
    elif len(value) == 2:
        left, right = (
            None if side is None else _bound(check_count("window", side, least=0)) for side in value
        )
    else:
        raise ValueError(f"window must be a width or (left, right), got {value!r}")
    return None if left is None and right is None else (left, right)


def _bound(distance: int) -> int | None:
    # No two positions are 2**31 apart, and to compare with that takes more than 32 bits.
    return distance if distance < 2**31 - 1 else None


def check_finite(name: str, value: Any) -> float:
    """``value`` as a finite float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number: Any = value
    if not -math.inf < number < math.inf:  # torch's compiler knows no isfinite of a symbol
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(number)


def check_scheme(scheme: Any) -> None:
    """An instance of a scheme, not its class, its name, or something else."""
    if isinstance(scheme, type) or not hasattr(scheme, "hooks"):
        raise TypeError(
            f"scheme must be an instance of a PositionScheme, such as posenc.NoPE(), got {scheme!r}"
        )


def check_choice(name: str, value: Any, accepted: Iterable[str]) -> None:
    """``value`` is one of ``accepted``; if not, the error suggests the nearest."""
    choices = list(accepted)
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}{nearest(value, choices)}")


def nearest(value: Any, choices: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest one, and all that are accepted."""
    import difflib  # for errors only

    known = list(choices)
    close = difflib.get_close_matches(str(value).lower(), [c.lower() for c in known], n=1)
    hint = [c for c in known if c.lower() in close]
    guess = f" (did you mean {hint[0]!r}?)" if hint else ""
    return f"{guess}; accepted: {', '.join(known) or 'none'}"
