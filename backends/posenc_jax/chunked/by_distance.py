"""A bias, or some terms of it, as a table by distance, where they depend on distance alone.

A tile computes the bias of its pairs, which costs little beside its scores if it is a product and
a sum. A look-up by bucket or a sum of 64 cosines costs more than the scores. XLA would compute it
for every pair even if it is written per distance, so the table is made before the loops over tiles.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from posenc.backend import Call, Tokens, bias_by_distance, has_channel_decay
from posenc_jax.chunked.blocks import Terms, Tiling
from posenc_jax.operations import is_cheaper_by_distance
from posenc_jax.trees import Arrays
from posenc_jax.unfold import slices

TABLE = "by_distance"  # among a tile's learned arrays


def split_bias(call: Call) -> tuple[Array | None, Terms]:
    """The bias at all distances, ``(H or 1, Q + K - 1)``, and the terms that tiles compute.

    A sum may have both. None if tiles compute all of it.
    """
    whole: Terms = (("", call.scheme),)
    if has_channel_decay(call.scheme):
        return None, whole  # which reads the arrays of all terms
    table, by_pair = None, []
    for name, term in zip(call.scheme.bias_terms(), call.bias_terms(), strict=True):
        own = bias_by_distance(term) if _needs_table(term) else None
        if own is None:
            by_pair.append(name)
        else:
            table = own if table is None else table + own
    return table, whole if table is None else tuple(by_pair)


def _needs_table(term: Call) -> bool:
    specs = term.scheme.param_specs().values()
    reads_table = any(spec.per_head and len(spec.shape) > 1 for spec in specs)
    return reads_table or is_cheaper_by_distance(term)


def of_terms(arrays: Arrays, terms: Terms) -> Arrays:
    """The arrays that the terms read, by their names in the whole scheme."""
    prefixes = tuple(prefix for prefix, _ in terms)
    return {name: array for name, array in arrays.items() if name.startswith(prefixes)}


def pad_table(table: Array, tiling: Tiling) -> Array:
    """The table with the distances of padding; its values are of no use."""
    return jnp.pad(table, ((0, 0), tiling.padding), mode="edge")


def tile_of_table(table: Array, tiling: Tiling, query: Tokens, key: Tokens) -> Array:
    """The bias of a tile at default positions, ``(1, H or 1, bq, bk)``, from a padded table."""
    rows, columns = query.pos.shape[-1], key.pos.shape[-1]
    # The first position is the lowest. XLA computes a minimum first, but would read the position
    # again for every pair.
    first_query, first_key = query.pos.min(), key.pos.min()
    start = first_key - (first_query + rows - 1) + tiling.k_len - 1 + tiling.padding[0]
    values = lax.dynamic_slice_in_dim(table, start, rows + columns - 1, axis=-1)
    tile: Array = slices(values, rows=rows)[None]
    return tile
