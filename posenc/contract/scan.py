"""A loop over blocks of tokens, from the last to the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posenc.contract.operations import operations_of
from posenc.contract.specs import Array, Namespace


def scan_back(
    step: Callable[..., tuple[Any, Array]],
    start: Any,
    blocks: tuple[Array, ...],
    fixed: tuple[Array, ...] = (),
    *,
    xp: Namespace,
) -> Array:
    """``carry, result = step(carry, block, fixed, xp=xp)`` for each block, the last first.

    ``blocks`` are arrays with one first axis, along which ``step`` gets them. Returns the results,
    stacked in the order of the blocks. ``step`` is a function of a module: a program is compiled
    for each.
    """
    of_framework = operations_of(xp).scan_back
    if of_framework is not None:
        return of_framework(step, start, blocks, fixed)
    carry, results = start, []
    for n in reversed(range(blocks[0].shape[0])):
        carry, result = step(carry, tuple(array[n, ...] for array in blocks), fixed, xp=xp)
        results.append(result)
    return xp.stack(results[::-1])
