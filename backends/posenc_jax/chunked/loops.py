"""Loops over blocks; a single block needs no loop, and XLA then fuses it with its surroundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax

from posenc_jax.chunked.blocks import Index


def loop_blocks(bounds: tuple[Index, Index], step: Callable[[Any, Any], Any], start: Any) -> Any:
    """``step(i, carry)`` for ``i`` from the first bound to before the second."""
    if all(isinstance(bound, int) for bound in bounds) and bounds == (0, 1):
        return step(0, start)
    return lax.fori_loop(*bounds, step, start)


def scan_blocks(step: Callable[[Any, Any], Any], start: Any, blocks: Any) -> Any:
    """``lax.scan``: the last carry, and the results, stacked."""
    if _count(blocks) > 1:
        return lax.scan(step, start, blocks)
    carry, result = step(start, jax.tree.map(lambda a: a[0], blocks))
    return carry, jax.tree.map(lambda a: a[None], result)


def map_blocks(function: Callable[[Any], Any], blocks: Any) -> Any:
    """``lax.map``: the results, stacked."""
    return scan_blocks(lambda _, one: (None, function(one)), None, blocks)[1]


def _count(blocks: Any) -> int:
    leaves: list[Array] = jax.tree.leaves(blocks)
    return int(leaves[0].shape[0])
