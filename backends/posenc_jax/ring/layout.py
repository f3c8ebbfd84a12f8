"""Which tokens of a sequence each shard holds."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from posenc.backend import check_count


def zigzag(length: int, shards: int) -> np.ndarray[Any, Any]:
    """Positions ``(length,)`` in the order of shards, with an early and a late part in each.

    Of ``2 n`` equal parts, shard ``r`` of ``n`` holds parts ``r`` and ``2 n - 1 - r``. Under a
    causal mask all shards then have the same work at every hop. ``x[order]`` lays tokens out this
    way, and ``y[numpy.argsort(order)]`` brings results back into the order of positions.

    Raises
    ------
    TypeError, ValueError
        ``length`` is not a positive multiple of ``2 * shards``.

    >>> zigzag(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    count = 2 * check_count("shards", shards)
    length = check_count("length", length)
    if length % count:
        raise ValueError(f"length must be a multiple of 2 * shards = {count}, got {length}")
    parts = np.arange(length).reshape(count, -1)
    return np.concatenate([parts[[r, -1 - r]].ravel() for r in range(shards)])


def consecutive_positions(
    q_len: int, k_len: int, axis_name: str | tuple[str, ...], shards: int
) -> tuple[Array, Array]:
    """Default positions of this shard's queries and keys; the ends of the whole q and k align."""
    if q_len > k_len:
        raise ValueError(
            f"q has length {q_len} per shard, k only {k_len}: give pos of tokens and "
            "of queries, the default aligns ends"
        )
    shard = lax.axis_index(axis_name)
    first = shards * (k_len - q_len)
    return first + shard * q_len + jnp.arange(q_len), shard * k_len + jnp.arange(k_len)


def axis_size(axis_name: str | tuple[str, ...]) -> int:
    """The number of shards.

    Raises
    ------
    ValueError
        The axis is not bound.
    """
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis here: call ring_attention inside "
            "jax.shard_map, over a mesh that has the axis"
        ) from None
