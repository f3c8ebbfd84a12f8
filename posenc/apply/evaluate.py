"""Apply a scheme to arrays: its bias, its transform, its embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from array_api_compat import array_namespace, device

from posenc.angles.rotary import check_rotary, rotary_tables
from posenc.apply.by_distance import distances_of_pairs
from posenc.apply.feature_needs import reads_features
from posenc.contract.checks import check_scheme
from posenc.contract.operations import hold
from posenc.contract.params import (
    Features,
    GroupedKeyParams,
    Params,
    ReadTable,
    as_mapping,
    check_key_heads,
    check_params,
    head_count,
    head_views,
    merge_constants,
    of_keys,
    tile_views,
    working_dtype,
)
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme, Role
from posenc.contract.tokens import Rotary, Tokens
from posenc.positions.integers import as_places, as_positions

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
    xp = xp or array_namespace(q_pos, k_pos)
    q_at, k_at = (as_positions(n, p, xp=xp) for n, p in (("q_pos", q_pos), ("k_pos", k_pos)))
    batch = check_batches(q_pos=q_at, k_pos=k_at)
    if reads_features(scheme):
        raise ValueError(
            f"the bias of {type(scheme).__name__} depends on features of tokens, not on positions "
            "alone; posenc.attention computes them"
        )
    arrays, work = prepare_params(scheme, params, like=q_at, dtype=dtype, xp=xp)
    q, k = as_column(q_at), as_row(k_at)
    shape = (batch, head_count(scheme) or 1, q.shape[-2], k.shape[-1])
    if len(q_at.shape) == 2 or len(k_at.shape) == 2:
        value = dense_bias(scheme, q, k, arrays, dtype=work, xp=xp)
        return None if value is None else _cast(_broadcast(value, shape, xp), dtype, xp)
    # First without the batch axis: JAX would copy the array to remove it.
    value = _bias_from_table(scheme, q[0, ...], k[0, ...], arrays, dtype=work, xp=xp)
    if value is None:
        value = bias_tile(scheme, q, k, arrays, dtype=work, xp=xp)
        value = None if value is None else _broadcast(value, shape, xp)[0, ...]
    return None if value is None else _cast(_broadcast(value, shape[1:], xp), dtype, xp)


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
) -> Array | None:
    """``bias_tile`` of all pairs, through a table by distance where that is faster.

    ``in_order``: the positions are ``K - Q .. K - 1`` and ``0 .. K - 1``.
    """
    value = _bias_from_table(scheme, q, k, arrays, dtype=dtype, xp=xp, in_order=in_order)
    if value is not None:
        return value
    return bias_tile(
        scheme, q, k, arrays, query=query, key=key, dtype=dtype, xp=xp, read=read,
        consecutive=in_order,
    )  # fmt: skip


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
    batch = max([1, *(a.shape[0] for a in both)])
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


def transform(
    scheme: PositionScheme,
    x: Array,
    pos: Array,
    *,
    role: Role,
    params: Mapping[str, Array] | None = None,
    places: Array | None = None,
    features: Mapping[str, Array] | None = None,
    rotary: Rotary | None = None,
    xp: Namespace | None = None,
) -> Array:
    """Transform queries or keys by their positions; ``x`` itself if the scheme has no transform.

    It is faster in PyTorch or JAX if ``posenc_torch`` or ``posenc_jax`` is imported.

    Parameters
    ----------
    x
        ``(..., L, D)``: tokens are the axis before the last, as in ``(B, H, L, D)``. Swap the axes
        of JAX's ``(B, L, H, D)`` first: if ``L == H``, the mistake cannot be detected.
    pos
        Integer positions ``(L,)``, or ``(B, L)`` with ``B`` the first axis of ``x``.
    role
        ``"query"`` or ``"key"``.
    places
        Coordinates to encode instead of positions, ``(L, axes)`` or ``(B, L, axes)``.
        Default: the position on every axis of the scheme.
    features
        Features of these tokens that the transform reads, ``(B, H, L)`` or ``(B, H, L, M)``.
        ``posenc.features`` computes them.
    rotary
        ``posenc.rotary(scheme, pos)`` of these positions, or places, if a model made it for all
        its layers. Default: made here.

    Returns
    -------
    ``(..., L, E)`` in the dtype of ``x``; most schemes keep the number of channels, ``E = D``.
    """
    check_scheme(scheme)
    xp = xp or array_namespace(x)
    if role not in ("query", "key"):
        raise ValueError(f"role must be 'query' or 'key', got {role!r}")
    if len(x.shape) < 2 or not xp.isdtype(x.dtype, "real floating"):
        raise ValueError(f"x must be floating, (..., L, D), got {tuple(x.shape)} of {x.dtype}")
    at = as_positions("pos", pos, device=device(x), xp=xp)
    if at.shape[-1] != x.shape[-2]:
        swapped = len(x.shape) > 2 and at.shape[-1] == x.shape[-3]
        hint = "; swap the axes of (B, L, H, D) first" if swapped else ""
        raise ValueError(
            f"pos has {at.shape[-1]} positions, x (..., L, D) = {tuple(x.shape)} has "
            f"L = {x.shape[-2]}{hint}"
        )
    if places is not None:
        at = as_places("places", places, scheme.axes, x.shape[-2], device=device(x), xp=xp)
    several = scheme.axes > 1
    if several and places is None:
        at = positions_as_places(at, scheme.axes, xp=xp)
    if len(at.shape) == 2 + several and (
        len(x.shape) < 3 or (at.shape[0] != 1 and at.shape[0] != x.shape[0])
    ):
        raise ValueError(
            f"pos {tuple(at.shape)} needs x (B, ..., L, D) of the same B, got {tuple(x.shape)}"
        )
    if not has_transform(scheme):
        check_params(scheme, params, xp=xp)
        if rotary is not None:
            check_rotary(rotary, scheme, role)
        return x
    return transform_at(
        scheme, x, at, role=role, params=params, features=features or {}, rotary=rotary, xp=xp
    )


def transform_at(
    scheme: PositionScheme,
    x: Array,
    at: Array,
    *,
    role: Role,
    params: Mapping[str, Array] | None,
    features: Mapping[str, Array],
    rotary: Rotary | None,
    xp: Namespace,
) -> Array:
    """``transform`` at checked positions, or places, of vectors ``x`` that fit them."""
    return transformation(
        scheme, x, at, role=role, params=params, features=features, rotary=rotary, xp=xp
    )(x)


def transformation(
    scheme: PositionScheme,
    like: Array,
    at: Array,
    *,
    role: Role,
    params: Mapping[str, Array] | None,
    features: Mapping[str, Array],
    rotary: Rotary | None,
    xp: Namespace,
) -> Callable[[Array], Array]:
    """``transform_at`` as a function of vectors of the shape and the dtype of ``like``."""
    x = like
    if len(at.shape) == (3 if scheme.axes > 1 else 2):
        at = xp.reshape(at, (at.shape[0], *[1] * (len(x.shape) - 3), *at.shape[1:]))
    arrays, work = prepare_params(scheme, params, like=x, dtype=x.dtype, xp=xp)
    views = head_views(scheme, arrays, dtype=work, xp=xp, rows=True)
    if rotary is not None:
        views.rotary = rotary_tables(rotary, scheme, x, role, xp)
    if role == "query":
        views.query = Features(features, role)
    else:
        views.key = Features(features, role)
    heads, x_heads = head_count(scheme), x.shape[-3] if len(x.shape) > 2 else 1
    if role == "key":
        check_key_heads(scheme, x_heads)
    if heads is not None and heads != 1 and x_heads != heads:
        views = GroupedKeyParams(views, scheme, heads=heads, key_heads=x_heads)

    def turn(vectors: Array) -> Array:
        return scheme.transform(vectors, at, role=role, params=views, xp=xp)

    return turn


def rotary(
    scheme: PositionScheme,
    tokens: Tokens | Array,
    params: Mapping[str, Array] | None = None,
    *,
    dtype: Any = None,
    xp: Namespace | None = None,
) -> Rotary | None:
    """What a transform needs from positions alone, such as sines and cosines, for many calls.

    For queries and keys of many calls with an equal scheme: ``attention(q, k, v, scheme,
    tokens=Tokens(rotary=made))``. Without it every call computes the same numbers again. Results
    are the same. ``Positions.bind`` of an adapter does it for all layers of a model.

    Parameters
    ----------
    scheme
        The scheme of the calls.
    tokens
        ``Tokens`` with positions or places, or positions ``(L,)`` or ``(B, L)`` alone.
    params
        Learned arrays by name. Learned frequencies get gradients through the result.
    dtype
        Dtype of the queries and keys of the calls; half precision is transformed in float32.
        Default: float64 if a param is float64, else float32.

    Returns
    -------
    A ``Rotary``, which is a pytree in JAX; None if the scheme has none.
    """
    check_scheme(scheme)
    if not isinstance(tokens, Tokens):
        tokens = Tokens(tokens)
    given = tokens.places if tokens.pos is None else tokens.pos
    if given is None:
        raise ValueError("tokens must have pos or places, got neither")
    xp = xp or array_namespace(given)
    places, at = tokens.places, given
    if tokens.pos is not None:
        at = as_positions("tokens.pos", tokens.pos, xp=xp)
    if places is not None:
        length = at.shape[-1] if tokens.pos is not None else _length_of_places(places, scheme.axes)
        at = as_places("tokens.places", places, scheme.axes, length, device=device(at), xp=xp)
    regions = tuple(
        rotary(part, tokens, _params_of(part, params), dtype=dtype, xp=xp)
        for part, _ in scheme.regions()
    )
    if Hook.ROTARY not in scheme.hooks():
        return Rotary(scheme, {}, regions) if any(regions) else None
    if scheme.axes > 1 and places is None:
        at = positions_as_places(at, scheme.axes, xp=xp)
    if len(at.shape) == (3 if scheme.axes > 1 else 2):
        at = at[:, None, ...]
    arrays, work = prepare_params(scheme, params, like=at, dtype=dtype, xp=xp)
    if dtype is not None:
        work = xp.float64 if dtype == xp.float64 else xp.float32
    read_by_keys_only = of_keys(scheme)
    own = {name: array for name, array in arrays.items() if name not in read_by_keys_only}
    views = head_views(scheme, own, dtype=work, xp=xp, rows=True)
    return Rotary(scheme, hold(scheme.rotary(at, dtype=work, params=views, xp=xp), xp), regions)


def _length_of_places(places: Array, axes: int) -> int:
    """The number of tokens in ``(L, axes)`` or ``(B, L, axes)``, or without the last axis."""
    shape = tuple(places.shape)
    length: int = shape[-2] if len(shape) > 1 and shape[-1] == axes else shape[-1]
    return length


def _params_of(part: PositionScheme, params: Mapping[str, Array] | None) -> dict[str, Array]:
    """The params that a region of a scheme declares."""
    specs = part.param_specs()
    return {name: array for name, array in as_mapping(params).items() if name in specs}


def positions_as_places(pos: Array, axes: int, *, xp: Namespace) -> Array:
    """Positions ``(..., L)`` as places ``(..., L, axes)``: the position on every axis."""
    return xp.broadcast_to(pos[..., None], (*pos.shape, axes))


def embedding(
    scheme: PositionScheme,
    pos: Array,
    params: Mapping[str, Array] | None = None,
    *,
    places: Array | None = None,
    dtype: Any = None,
    xp: Namespace | None = None,
) -> Array | None:
    """The term that a scheme adds to token embeddings; None if it has none.

    Parameters
    ----------
    pos
        Integer positions, ``(L,)`` or ``(B, L)``.
    places
        Coordinates to encode instead of positions, ``(L, axes)`` or ``(B, L, axes)``.
    dtype
        Dtype of the result. Default: float64 if a param is float64, else float32.

    Returns
    -------
    ``(L, dim)`` or ``(B, L, dim)``.
    """
    check_scheme(scheme)
    xp = xp or array_namespace(pos)
    at = as_positions("pos", pos, xp=xp)
    if places is not None:
        at = as_places("places", places, scheme.axes, at.shape[-1], device=device(at), xp=xp)
    elif scheme.axes > 1:
        at = positions_as_places(at, scheme.axes, xp=xp)
    arrays, work = prepare_params(scheme, params, like=at, dtype=dtype, xp=xp)
    value = scheme.embedding(at, params=Params(arrays, work), xp=xp)
    return None if value is None else _cast(value, dtype, xp)


def has_embedding(scheme: PositionScheme) -> bool:
    """Whether a scheme acts on token embeddings."""
    return Hook.EMBEDDING in scheme.hooks()


def has_transform(scheme: PositionScheme) -> bool:
    """Whether a scheme transforms queries and keys."""
    return Hook.TRANSFORM in scheme.hooks()


def has_bias(scheme: PositionScheme) -> bool:
    """Whether a scheme has a bias."""
    return Hook.BIAS in scheme.hooks()


def check_batches(**positions: Array) -> int:
    """The common batch size of arrays ``(L,)`` or ``(B, L)``; 1 if none has a batch axis."""
    sizes = {name: p.shape[0] for name, p in positions.items() if len(p.shape) == 2}
    batch: int = max(sizes.values()) if sizes else 1  # torch's compiler has no max(default=)
    for name, size in sizes.items():
        if size != 1 and size != batch:
            raise ValueError(f"{name} has batch {size}, others have {batch}: {sizes}")
    return batch


def prepare_params(
    scheme: PositionScheme,
    params: Mapping[str, Array] | None,
    *,
    like: Array,
    dtype: Any,
    xp: Namespace,
) -> tuple[dict[str, Array], Any]:
    """Params and constants on the device of ``like``, and the working dtype."""
    work = working_dtype(list(as_mapping(params).values()), xp=xp)
    work = xp.float64 if dtype == xp.float64 else work
    return merge_constants(scheme, params, dtype=work, device=device(like), xp=xp), work


def as_column(pos: Array) -> Array:
    """``(L,) -> (1, 1, L, 1)``, ``(B, L) -> (B, 1, L, 1)``."""
    return pos[None, None, :, None] if len(pos.shape) == 1 else pos[:, None, :, None]


def as_row(pos: Array) -> Array:
    """``(L,) -> (1, 1, 1, L)``, ``(B, L) -> (B, 1, 1, L)``."""
    return pos[None, None, None, :] if len(pos.shape) == 1 else pos[:, None, None, :]


def _cast(array: Array, dtype: Any, xp: Namespace) -> Array:
    return array if dtype is None else xp.astype(array, dtype)
