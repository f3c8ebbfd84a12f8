"""Arrays of constant numbers: the constants of a scheme, and the frequencies of angles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posenc.protocol import Array, Namespace

# A function of a backend by the name of its namespace, instead of ``xp.asarray``.
_MAKERS: dict[str, Callable[..., Array]] = {}


def constant_array(values: tuple[float, ...], *, dtype: Any, device: Any, xp: Namespace) -> Array:
    """``values`` as an array ``(n,)``. Never write to it: calls may share it."""
    make: Callable[..., Array] = _MAKERS.get(xp.__name__, xp.asarray)
    return make(values, dtype=dtype, device=device)


def make_constants_with(make: Callable[..., Array], *, xp: Namespace) -> None:
    """From now on ``make(values, dtype=, device=)`` makes the constant arrays of a namespace.

    A backend keeps arrays with it if copying numbers to a device takes long. It must return an
    array that the running program can use, whether that is traced, compiled or eager.
    """
    _MAKERS[xp.__name__] = make
