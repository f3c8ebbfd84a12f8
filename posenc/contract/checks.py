"""Checks of arguments. An error names the argument, its value, and the accepted values."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np


def python_number(value: Any) -> Any:
    """A NumPy scalar or another library's integer as a Python number; other values unchanged.

    A tuple is converted item by item.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is tuple:
        return tuple(map(python_number, value))
    if isinstance(value, int) or not hasattr(value, "__index__"):
        return value
    try:
        return operator.index(value)
    except TypeError:  # an array of floats, or of more than one number
        return value


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """``value`` as an int of at least ``least``; a bool or a float is a ``TypeError``."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        # Not for int: operator.index makes torch's compiler recompile for every new value.
        count = value if type(value) is int else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return count


def check_distance(name: str, value: Any) -> int:
    """``value`` as a number of positions, ``1 .. 2**30``: a larger one would not fit 32 bits."""
    count = check_count(name, value)
    if count > 2**30:
        raise ValueError(f"{name} must be at most 2**30 = {2**30}, got {value!r}")
    return count


def check_positive(name: str, value: Any) -> float:
    """``value`` as a finite float above zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number: Any = value
    if not 0 < number < math.inf:  # torch's compiler has no isfinite for symbols
        raise ValueError(f"{name} must be finite and greater than 0, got {value!r}")
    return _as_float(name, number)


def check_flag(name: str, value: Any) -> bool:
    """``value`` as a bool; anything else, such as ``"False"``, is a ``TypeError``."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_window(value: Any) -> tuple[int | None, int | None] | None:
    """A window as ``(left, right)``, how far back and ahead a query sees; None for no bound.

    A width ``W`` becomes ``(W - 1, W - 1)``. The result is None if nothing is bounded.
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
    # No two positions are farther apart, and a larger bound would not fit 32 bits.
    return distance if distance < 2**31 - 1 else None


def check_finite(name: str, value: Any) -> float:
    """``value`` as a finite float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number: Any = value
    if not -math.inf < number < math.inf:  # torch's compiler has no isfinite for symbols
        raise ValueError(f"{name} must be finite, got {value!r}")
    return _as_float(name, number)


def check_per_head(name: str, values: Iterable[Any], num_heads: int) -> tuple[float, ...]:
    """``values`` as finite floats, one per head."""
    try:
        numbers = tuple(float(m) for m in values)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be one number per head, got {values!r}") from None
    if len(numbers) != num_heads:
        raise ValueError(
            f"{name} has {len(numbers)} values for num_heads={num_heads}; give one each"
        )
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name} must be finite numbers, got {numbers}")
    return numbers


# The exponent of the smallest number that is not subnormal, the one above the largest, and digits.
# Subnormal numbers are 0 for some processors and compilers.
_EXPONENTS = {32: (-126, 128, 22), 64: (-1022, 1024, 51)}


def check_scale(value: Any, bits: int) -> float:
    """A factor of scores as a float: 0, or a number that ``bits`` hold with all digits."""
    scale, (low, high, _) = check_finite("scale", value), _EXPONENTS[bits]
    if scale != 0 and not 2.0**low <= abs(scale) < 2.0 ** (high - 1):
        raise ValueError(
            f"scale must be 0 or of a size from {2.0**low:.3g} to {2.0 ** (high - 1):.3g}, which "
            f"float{bits} holds, got {value!r}"
        )
    return scale


def check_softcap(value: Any, bits: int) -> float:
    """A cap of scores as a float; a score divided by it must keep digits in ``bits``.

    A score of ``2**-22`` (float64: ``2**-51``) over the highest cap is not subnormal yet.
    """
    softcap, (low, _, digits) = check_positive("softcap", value), _EXPONENTS[bits]
    if not 2.0**low <= softcap <= 2.0 ** (-low - digits):
        raise ValueError(
            f"softcap must be from {2.0**low:.3g} to {2.0 ** (-low - digits):.3g} in float{bits}, "
            f"got {value!r}; leave it out for no cap"
        )
    return softcap


def _as_float(name: str, number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer of more than 308 digits
        raise ValueError(f"{name} must be finite, got an integer that no float holds") from None


def check_scheme(scheme: Any) -> None:
    """Check that ``scheme`` is an instance of a scheme, not its class or its name."""
    if isinstance(scheme, type) or not hasattr(scheme, "hooks"):
        raise TypeError(
            f"scheme must be an instance of a PositionScheme, such as posenc.NoPE(), got {scheme!r}"
        )


def check_channels(name: str, array: Any, head_dim: int) -> None:
    """Check that vectors ``(..., D)`` have the ``head_dim`` of the scheme."""
    if array.shape[-1] != head_dim:
        raise ValueError(f"{name} has {array.shape[-1]} channels, the scheme head_dim={head_dim}")


def check_choice(name: str, value: Any, accepted: Iterable[str]) -> None:
    """Check that ``value`` is one of ``accepted``; if not, the error suggests the nearest."""
    choices = list(accepted)
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}{nearest(value, choices)}")


_MANY = 20  # names; more than that are not read


def nearest(value: Any, choices: Iterable[str], *, listing: str | None = None) -> str:
    """The end of an error about an unknown name: the nearest name, and all accepted names.

    ``listing`` says what prints them, and stands in their place where they are many.
    """
    import difflib  # only errors need it

    known = list(choices)
    close = difflib.get_close_matches(str(value).lower(), [c.lower() for c in known], n=1)
    hint = [c for c in known if c.lower() in close]
    guess = f" (did you mean {hint[0]!r}?)" if hint else ""
    if listing is not None and len(known) > _MANY:
        return f"{guess}; {listing} prints the {len(known)} accepted names"
    return f"{guess}; accepted: {', '.join(known) or 'none'}"
