"""Queries and keys with their positions, segments and features, as trees of arrays.

Tiles of ``chunked`` and shards of ``ring_attention`` are slices of them. Gradients have the same
structure, with None in place of integers.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from posenc.backend import Side


class Queries(NamedTuple):
    """Queries ``q (..., Q, D)`` and the side of their tokens."""

    q: Array
    side: Side


class Keys(NamedTuple):
    """Keys ``k (..., K, D)``, values ``v (..., K, Dv)`` and the side of their tokens.

    ``valid`` is False at padding; None without padding.
    """

    k: Array
    v: Array
    side: Side
    valid: Array | None = None
