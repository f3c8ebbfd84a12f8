"""Operations that a backend may provide for its framework, in place of those written here.

``posenc.constants`` has one more: arrays of constant numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the protocol uses this module
    from posenc.protocol import Array, Namespace

# Functions of a backend by the name of its namespace.
_HOLDS: dict[str, Callable[[Array], Array]] = {}
_ROTATIONS: dict[str, Callable[..., Array | None]] = {}


def hold(arrays: Mapping[str, Array], xp: Namespace) -> dict[str, Array]:
    """The same arrays, which a compiler writes to memory and does not compute anew in each use.

    A compiler that fuses a table ``(L, n)`` into a loop over ``(B, H, L, D)`` would take each sine
    once per head.
    """
    of_framework = _HOLDS.get(xp.__name__)
    if of_framework is None:
        return dict(arrays)
    return {name: of_framework(array) for name, array in arrays.items()}


def hold_with(function: Callable[[Array], Array], *, xp: Namespace) -> None:
    """From now on ``function(array)`` holds an array of a namespace. It must have derivatives."""
    _HOLDS[xp.__name__] = function


def rotated(x: Array, sin: Array, cos: Array, *, interleaved: bool, xp: Namespace) -> Array | None:
    """``x (..., 2n)`` with its pairs rotated by a backend; None if it has nothing better."""
    of_framework = _ROTATIONS.get(xp.__name__)
    return None if of_framework is None else of_framework(x, sin, cos, interleaved=interleaved)


def rotate_with(function: Callable[..., Array | None], *, xp: Namespace) -> None:
    """From now on ``function(x, sin, cos, interleaved=)`` rotates arrays of a namespace.

    Pairs are ``(2k, 2k + 1)`` if interleaved, else ``(k, k + n)``. It returns None for arrays that
    it does not serve.
    """
    _ROTATIONS[xp.__name__] = function
