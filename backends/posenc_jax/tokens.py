"""Queries and keys with their positions, segments and features, as trees of arrays.

Tiles of ``chunked`` and shards of ``ring_attention`` are slices of them. Gradients have the same
structure, with None in place of integers.
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import jax
from jax import Array

from posenc.backend import Tokens
from posenc_jax.trees import Arrays, is_float

jax.tree_util.register_dataclass(
    Tokens, data_fields=[each.name for each in fields(Tokens)], meta_fields=()
)


def float_features(side: Tokens) -> Arrays:
    """Features that have gradients: all but places, which are integers."""
    return {name: a for name, a in (side.features or {}).items() if is_float(a)}


class Queries(NamedTuple):
    """Queries ``q (..., Q, D)`` and the side of their tokens."""

    q: Array
    side: Tokens


class Keys(NamedTuple):
    """Keys ``k (..., K, D)``, values ``v (..., K, Dv)`` and the side of their tokens.

    ``valid`` is False at padding; None without padding.
    """

    k: Array
    v: Array
    side: Tokens
    valid: Array | None = None
