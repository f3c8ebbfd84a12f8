"""Sizes of a model, which makers of schemes and plans take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from posenc.contract.checks import nearest

T = TypeVar("T")
SIZES = ("num_heads", "head_dim", "max_len", "train_len", "dim", "hidden_dim")


def with_widths(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """``sizes`` with ``dim`` and ``hidden_dim``, if they follow from the others."""
    sizes = dict(sizes)
    if {"num_heads", "head_dim"} <= sizes.keys():
        sizes.setdefault("dim", sizes["num_heads"] * sizes["head_dim"])
    if "dim" in sizes:
        sizes.setdefault("hidden_dim", sizes["dim"])
    return sizes


def taking_sizes(function: Callable[..., T], also: tuple[str, ...] = ()) -> Callable[..., T]:
    """``function``, by keyword, which gets only the sizes that it names, or all if it takes ``**``.

    ``dim`` and ``hidden_dim`` follow from other sizes. ``also`` are names that count as sizes. Any
    other keyword that it does not name is an error, and so is one that it needs and does not get.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function written in C may have no signature
        return function
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return function
    required = (p for p in parameters.values() if p.default is p.empty)
    needed = [p.name for p in required if p.kind is not p.VAR_POSITIONAL]
    own, sizes = getattr(function, "__name__", repr(function)), {*SIZES, *also}

    def maker(**given: Any) -> T:
        for option in given.keys() - parameters.keys() - sizes:
            known = sorted(parameters.keys() - set(SIZES))
            raise ValueError(no_option(own, option, known))
        wanted = {n: value for n, value in with_widths(given).items() if n in parameters}
        if missing := [name for name in needed if name not in wanted]:
            raise TypeError(f"{own} needs {join_names(missing)}{given_sizes(given)}")
        return function(**wanted)

    return functools.update_wrapper(maker, function)


def no_option(own: str, option: str, known: list[str]) -> str:
    """The error for an unknown option, which may be a misspelt size of the model."""
    hint = nearest(option, known)
    if "did you mean" not in hint:
        hint = nearest(option, SIZES).partition(";")[0] + hint
    return f"{own} has no option {option!r}{hint}"


def join_names(missing: list[str]) -> str:
    """For example ``max_len and dim (or num_heads and head_dim)``."""
    derived = {
        "dim": "num_heads and head_dim",
        "hidden_dim": "dim, or num_heads and head_dim",
        "factor": "max_len and train_len",
        "long_factor": "factor, or max_len and train_len",
        "window": "train_len",
    }
    return " and ".join(f"{n} (or {derived[n]})" if n in derived else n for n in missing)


def given_sizes(given: Mapping[str, Any]) -> str:
    """The end of an error: which sizes were given, without those that follow from others."""
    sizes = {name: size for name, size in given.items() if name in SIZES}
    for name in ("hidden_dim", "dim"):
        others = {n: size for n, size in sizes.items() if n != name}
        if name in sizes and with_widths(others).get(name) == sizes[name]:
            sizes = others
    names = ", ".join(sizes)
    return f"; sizes that were given: {names or 'none'}"
