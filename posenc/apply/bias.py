"""The bias of a scheme: dense, at distances, on a tile."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from posenc.apply.by_distance import distances_of_pairs
from posenc.apply.feature_needs import reads_features
from posenc.apply.shapes import (
    as_column,
    as_row,
    cast,
    check_batches,
    common_size,
    prepare_params,
)
from posenc.contract.checks import check_scheme
from posenc.contract.operations import device, own_dtypes, shared_namespace
from posenc.contract.params import head_count, head_views, tile_views, without_prefix
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme
from posenc.contract.tables import ReadTable
from posenc.positions.integers import as_positions

_NONE: Mapping[str, Array] = {}


def bias(
    scheme: PositionScheme,
    q_pos: Array,
    k_pos: Array,
    params: Mapping[str, Array] | None = None,
    *,
    dtype: Any = None,
    xp: Namespace | None = None,
) -> Array | None:
    """The dense bias that a scheme adds to scaled scores.

    What else it does to scores is not in it, such as a transform, a sink, or the biases of regions
    (``scheme.hooks()`` says what there is); ``posenc.attention`` does all.

    Parameters
    ----------
    scheme
        A scheme whose bias depends on positions only. If it reads features of tokens, use
        ``posenc.attention``.
    q_pos, k_pos
        Integer positions, ``(L,)`` or ``(B, L)``.
    params
        Learned arrays by name; ``posenc.init_params`` draws first values.
    dtype
        Dtype of the result. Default: float64 if a param is float64, else float32.

    Returns
    -------
    ``(H, Q, K)`` for positions ``(L,)``, ``(B, H, Q, K)`` for ``(B, L)``; None without a bias.
    ``H`` is 1 for a scheme that declares nothing per head.

    Raises
    ------
    TypeError, ValueError
        Positions are not integers, or params are not the declared ones.
    """
    check_scheme(scheme)
    for name, pos in (("q_pos", q_pos), ("k_pos", k_pos)):
        if not hasattr(pos, "dtype"):
            raise TypeError(f"{name} must be an array of integers, got {type(pos).__name__}")
    xp = xp or shared_namespace(q_pos=q_pos, k_pos=k_pos)
    q_at, k_at = (as_positions(n, p, xp=xp) for n, p in (("q_pos", q_pos), ("k_pos", k_pos)))
    batch = check_batches(q_pos=q_at, k_pos=k_at)
    if reads_features(scheme):
        raise ValueError(
            f"the bias of {type(scheme).__name__} depends on features of tokens, not on positions "
            "alone; posenc.attention computes them"
        )
    arrays, work = prepare_params(scheme, params, like=q_at, dtype=dtype, xp=xp)
    with own_dtypes(xp):
        return _bias(scheme, q_at, k_at, batch, arrays, work=work, dtype=dtype, xp=xp)


def _bias(
    scheme: PositionScheme, q_pos: Array, k_pos: Array, batch: int, arrays: Mapping[str, Array],
    *, work: Any, dtype: Any, xp: Namespace,
) -> Array | None:  # fmt: skip
    """``bias`` at checked positions, computed in the dtype ``work``."""
    q, k = as_column(q_pos), as_row(k_pos)
    shape = (batch, head_count(scheme) or 1, q.shape[-2], k.shape[-1])
    if len(q_pos.shape) == 2 or len(k_pos.shape) == 2:
        value = dense_bias(scheme, q, k, arrays, dtype=work, xp=xp)
        return None if value is None else cast(_broadcast(value, shape, xp), dtype, xp)
    # First without the batch axis: JAX would copy the array to remove it.
    value = _bias_from_table(scheme, q[0, ...], k[0, ...], arrays, dtype=work, xp=xp)
    if value is None:
        value = bias_tile(scheme, q, k, arrays, dtype=work, xp=xp)
        value = None if value is None else _broadcast(value, shape, xp)[0, ...]
    return None if value is None else cast(_broadcast(value, shape[1:], xp), dtype, xp)


def _broadcast(value: Array, shape: tuple[int, ...], xp: Namespace) -> Array:
    """``value`` in a shape; itself if it has that shape, because NumPy's views are read-only."""
    return value if tuple(value.shape) == shape else xp.broadcast_to(value, shape)


def dense_bias(
    scheme: PositionScheme,
    q: Array,
    k: Array,
    arrays: Mapping[str, Array],
    *,
    query: Mapping[str, Array] = _NONE,
    key: Mapping[str, Array] = _NONE,
    dtype: Any,
    xp: Namespace,
    read: ReadTable | None = None,
    in_order: bool = False,
    consecutive: bool = False,
) -> Array | None:
    """``bias_tile``, through a table by distance where that is faster.

    A bias that is a sum may have such a table for some of its terms. ``in_order``: the positions
    are ``K - Q .. K - 1`` and ``0 .. K - 1``, and so they are ``consecutive``.
    """
    value = _bias_from_table(scheme, q, k, arrays, dtype=dtype, xp=xp, in_order=in_order)
    if value is not None:
        return value
    tile = partial(bias_tile, dtype=dtype, xp=xp, read=read, consecutive=consecutive or in_order)
    terms = scheme.bias_terms()
    tables = [
        _bias_from_table(term, q, k, without_prefix(arrays, prefix), dtype=dtype, xp=xp,
                         in_order=in_order)
        for prefix, term in (terms if len(terms) > 1 else ())
    ]  # fmt: skip
    if all(table is None for table in tables):
        return tile(scheme, q, k, arrays, query=query, key=key)
    for (prefix, term), table in zip(terms, tables, strict=True):
        if table is None:
            own, query_own, key_own = (without_prefix(a, prefix) for a in (arrays, query, key))
            table = tile(term, q, k, own, query=query_own, key=key_own)
        if table is not None:
            value = table if value is None else value + table
    return value


def _bias_from_table(
    scheme: PositionScheme,
    q: Array,
    k: Array,
    arrays: Mapping[str, Array],
    *,
    dtype: Any,
    xp: Namespace,
    in_order: bool = False,
) -> Array | None:
    """``(..., H or 1, Q, K)`` for ``q (..., 1, Q, 1)`` and ``k (..., 1, 1, K)``.

    None if the bias does not depend on distance alone, or if a table of it is not faster.
    """
    if not depends_on_distance(scheme):
        return None
    linear = Hook.KEY_BIAS in scheme.hooks()
    found = distances_of_pairs(q, k, in_order=in_order, linear=linear, xp=xp)
    if found is None:
        return None
    at = xp.arange(found.size, dtype=q.dtype, device=device(q)) + found.lowest
    table = bias_at_distances(scheme, at, arrays, dtype=dtype, xp=xp)
    return None if table is None else found.at_pairs(table, q, k, xp=xp)


def depends_on_distance(scheme: PositionScheme) -> bool:
    """Whether a scheme has a bias that depends on distance alone."""
    return scheme.relative and has_bias(scheme) and not reads_features(scheme)


def bias_at_distances(
    scheme: PositionScheme, at: Array, arrays: Mapping[str, Array], *, dtype: Any, xp: Namespace
) -> Array | None:
    """The bias at distances ``k - q``, ``(H or 1, N)`` for ``at (N,)``; None without a bias."""
    at = xp.reshape(at, (1, 1, -1))
    tile = bias_tile(scheme, xp.zeros_like(at), at, arrays, dtype=dtype, xp=xp)
    if tile is None:
        return None
    heads = tile.shape[0] if len(tile.shape) == 3 else 1
    # A constant bias may lack axes of the positions.
    return xp.reshape(xp.broadcast_to(tile, (heads, *at.shape[1:])), (heads, at.shape[-1]))


def bias_tile(
    scheme: PositionScheme,
    q: Array,
    k: Array,
    arrays: Mapping[str, Array],
    *,
    query: Mapping[str, Array] = _NONE,
    key: Mapping[str, Array] = _NONE,
    dtype: Any,
    xp: Namespace,
    read: ReadTable | None = None,
    consecutive: bool = False,
) -> Array | None:
    """The bias of every head on a tile, ``(B or 1, H or 1, Q, K)``.

    ``q (B or 1, 1, Q, 1)`` and ``k (B or 1, 1, 1, K)`` are positions. ``arrays`` come from
    ``merge_constants``, in the working ``dtype``. ``query`` and ``key`` are features ``(B, H, L)``
    or ``(B, H, L, M)`` of the tile's tokens.

    ``read`` reads the tables of tokens. ``consecutive``: so are the positions of the tile's
    queries, and those of its keys. Then ``read`` may know that an index depends on the distance.
    """
    specs = scheme.param_specs()
    # An index that depends on a feature shows it by its axes, unless the feature has one of each.
    both = (*query.values(), *key.values())
    by_distance = consecutive and scheme.relative and all(_has_heads_or_batch(a) for a in both)
    tables = {"xp": xp, "read": read, "by_distance": by_distance}
    views = head_views(
        scheme, arrays, dtype=dtype, xp=xp,
        query=tile_views(query, "query", **tables), key=tile_views(key, "key", **tables),
    )  # fmt: skip
    # Read from the arrays: a tile may hold only some of the scheme's heads.
    sizes = [a.shape[0] for n, a in arrays.items() if n not in specs or specs[n].per_head]
    sizes += [a.shape[1] for a in both if a.shape[1] != 1]
    heads = sizes[0] if sizes else head_count(scheme) or 1
    batch = common_size(*(a.shape[0] for a in both))
    return scheme_bias(scheme, q, k, views, heads=heads, batch=batch, xp=xp)


def _has_heads_or_batch(feature: Array) -> bool:
    return tuple(feature.shape[:2]) != (1, 1)


def scheme_bias(
    scheme: PositionScheme,
    q: Array,
    k: Array,
    params: Mapping[str, Array],
    *,
    heads: int = 1,
    batch: int = 1,
    xp: Namespace,
) -> Array | None:
    """The result of ``scheme.bias``, with its shape checked.

    ``heads`` and ``batch`` are the sizes that those axes may have besides 1.

    Raises
    ------
    TypeError, ValueError
        The result is not an array, or does not broadcast to ``(..., Q, K)``.
    """
    value = scheme.bias(q, k, params=params, xp=xp)
    if value is None:
        return None
    name = f"the bias of {type(scheme).__name__}"
    if not hasattr(value, "shape"):
        raise TypeError(f"{name} must be an array, got {value!r}")
    if not _fits(tuple(value.shape), heads, batch, q.shape, k.shape):
        sizes = tuple(a.shape[axis] for a, axis in ((q, -2), (k, -1)) if len(a.shape) > 1)
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} for q {tuple(q.shape)} and k {tuple(k.shape)}: "
            f"it must broadcast to (Q, K) = {sizes}, or to (H, Q, K) with its heads"
        )
    return value


def _fits(shape: tuple[int, ...], heads: int, batch: int, *positions: tuple[int, ...]) -> bool:
    """Whether every axis of a bias is 1, an axis of its positions, the heads or the batch."""
    most = max(len(pos) for pos in positions)
    if len(shape) > (most if most < 2 else max(most, 3)):
        return False
    for axis in range(-len(shape), 0):
        size = shape[axis]
        of_positions = any(len(pos) >= -axis and size == pos[axis] for pos in positions)
        other = {-3: heads, -4: batch}.get(axis)
        if not (size == 1 or of_positions or size == other):
            return False
    return True


def has_bias(scheme: PositionScheme) -> bool:
    """Whether a scheme has a bias."""
    return Hook.BIAS in scheme.hooks()
