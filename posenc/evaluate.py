"""A scheme applied to arrays: its bias, its transform, its embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from array_api_compat import array_namespace, device

from posenc.checks import check_scheme
from posenc.params import (
    Features,
    GroupedKeyParams,
    Params,
    as_mapping,
    head_count,
    head_views,
    merge_constants,
    tile_views,
    working_dtype,
)
from posenc.positions import as_places, as_positions
from posenc.protocol import HOOKS, Array, Namespace, PositionScheme, Role
from posenc.schemes.nope import NoPE

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
    """What a scheme adds to the scaled scores, dense.

    Parameters
    ----------
    scheme
        A scheme whose bias depends on positions; one that reads features of tokens needs
        ``posenc.attention``.
    q_pos, k_pos
        Integer positions, ``(L,)`` or ``(B, L)``.
    params
        Learned arrays by name; ``posenc.init_params`` draws first values.
    dtype
        Of the result. Default: float64 if a param is, else float32.

    Returns
    -------
    ``(H, Q, K)`` for positions ``(L,)``, ``(B, H, Q, K)`` for ``(B, L)``; None without a bias.
    ``H`` is 1 for a scheme that declares nothing per head.

    Raises
    ------
    TypeError, ValueError
        Positions that are no integers, params other than the declared ones.
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
    batched = len(q_at.shape) == 2 or len(k_at.shape) == 2
    value = bias_tile(scheme, as_column(q_at), as_row(k_at), arrays, dtype=work, xp=xp)
    if value is None:
        return None
    shape = (batch, head_count(scheme) or 1, q_at.shape[-1], k_at.shape[-1])
    value = _cast(xp.broadcast_to(value, shape), dtype, xp)
    return value if batched else value[0, ...]


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
) -> Array | None:
    """The bias of every head on a tile: ``(B, H, Q, K)``, or with any of ``B, H`` equal to 1.

    ``q (B or 1, 1, Q, 1)`` and ``k (B or 1, 1, 1, K)`` are positions; ``arrays`` are learned params
    and constants, whole, in the working ``dtype``; ``query`` and ``key`` are features ``(B, H, L)``
    or ``(B, H, L, M)`` of these tokens.
    """
    specs = scheme.param_specs()
    views = head_views(
        scheme, arrays, dtype=dtype, xp=xp,
        query=tile_views(query, "query", xp=xp), key=tile_views(key, "key", xp=xp),
    )  # fmt: skip
    own = [a.shape[0] for n, a in arrays.items() if n not in specs or specs[n].per_head]
    own += [a.shape[1] for side in (query, key) for a in side.values() if a.shape[1] != 1]
    heads = own[0] if own else head_count(scheme) or 1
    batch = max([1, *(a.shape[0] for side in (query, key) for a in side.values())])
    return scheme_bias(scheme, q, k, views, heads=heads, batch=batch, xp=xp)


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
    """What the scheme's own ``bias`` answers, which has the shape of its arguments, with ``heads``,
    of which a tile may have a part, and with the ``batch`` of its features.

    Raises
    ------
    TypeError, ValueError
        The answer is no array, or does not broadcast to ``(..., Q, K)``.
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


def _fits(found: tuple[int, ...], heads: int, batch: int, *given: tuple[int, ...]) -> bool:
    """Whether a bias has no axis and no size but its arguments' own, the heads and the batch."""
    most = max(len(shape) for shape in given)
    if len(found) > (most if most < 2 else max(most, 3)):
        return False
    for axis in range(-len(found), 0):
        size = found[axis]
        own = any(len(shape) >= -axis and size == shape[axis] for shape in given)
        other = {-3: heads, -4: batch}.get(axis)
        if not (size == 1 or own or size == other):
            return False
    return True


def transform(
    scheme: PositionScheme,
    x: Array,
    pos: Array,
    *,
    role: Role,
    params: Mapping[str, Array] | None = None,
    axes: Array | None = None,
    features: Mapping[str, Array] | None = None,
    xp: Namespace | None = None,
) -> Array:
    """Queries or keys as seen from their positions; ``x`` itself where a scheme changes nothing.

    Parameters
    ----------
    x
        ``(..., L, D)``: tokens are the axis before the last, as in ``(B, H, L, D)``. Swap the axes
        of JAX's ``(B, L, H, D)`` first: where ``L == H``, no error can tell.
    pos
        Integer positions ``(L,)``, or ``(B, L)`` with ``B`` the first axis of ``x``.
    role
        ``"query"`` or ``"key"``.
    axes
        Places ``(L, axes)`` or ``(B, L, axes)`` that stand for positions here. Default: the
        position on every axis of the scheme.
    features
        Features of these tokens that the transform reads, ``(B, H, L)`` or ``(B, H, L, M)``; see
        ``posenc.features``.

    Returns
    -------
    The shape and dtype of ``x``.
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
    if axes is not None:
        at = as_places("axes", axes, scheme.axes, x.shape[-2], device=device(x), xp=xp)
    several = scheme.axes > 1
    if several and axes is None:
        at = positions_as_places(at, scheme.axes, xp=xp)
    if len(at.shape) == 2 + several:
        if len(x.shape) < 3 or (at.shape[0] != 1 and at.shape[0] != x.shape[0]):
            raise ValueError(
                f"pos {tuple(at.shape)} needs x (B, ..., L, D) of the same B, got {tuple(x.shape)}"
            )
        at = xp.reshape(at, (at.shape[0], *[1] * (len(x.shape) - 3), *at.shape[1:]))
    arrays, work = prepare_params(scheme, params, like=x, dtype=x.dtype, xp=xp)
    views = head_views(scheme, arrays, dtype=work, xp=xp, rows=True)
    own_features = Features(features or {}, role)
    if role == "query":
        views.query = own_features
    else:
        views.key = own_features
    heads, own = head_count(scheme), x.shape[-3] if len(x.shape) > 2 else 1
    if heads is not None and heads != 1 and own != heads:
        views = GroupedKeyParams(views, heads=heads, key_heads=own)
    return scheme.transform(x, at, role=role, params=views, xp=xp)


def positions_as_places(pos: Array, axes: int, *, xp: Namespace) -> Array:
    """Positions ``(..., L)`` as places ``(..., L, axes)``: the position on every axis."""
    return xp.broadcast_to(pos[..., None], (*pos.shape, axes))


def embedding(
    scheme: PositionScheme,
    pos: Array,
    params: Mapping[str, Array] | None = None,
    *,
    axes: Array | None = None,
    dtype: Any = None,
    xp: Namespace | None = None,
) -> Array | None:
    """What a scheme adds to token embeddings: ``(..., dim)`` for ``pos (L,)`` or ``(B, L)``.

    ``axes`` are places ``(L, axes)`` or ``(B, L, axes)`` that stand for positions here. ``dtype``
    is that of the result; default float64 if a param is, else float32. None without an embedding.
    """
    check_scheme(scheme)
    xp = xp or array_namespace(pos)
    at = as_positions("pos", pos, xp=xp)
    if axes is not None:
        at = as_places("axes", axes, scheme.axes, at.shape[-1], device=device(at), xp=xp)
    elif scheme.axes > 1:
        at = positions_as_places(at, scheme.axes, xp=xp)
    arrays, work = prepare_params(scheme, params, like=at, dtype=dtype, xp=xp)
    value = scheme.embedding(at, params=Params(arrays, work), xp=xp)
    return None if value is None else _cast(value, dtype, xp)


def has_embedding(scheme: PositionScheme) -> bool:
    """Whether a scheme acts on token embeddings."""
    return "embedding" in scheme.hooks()


def embeds_only(scheme: PositionScheme) -> bool:
    """Whether a scheme acts on token embeddings and has nothing that attention could use."""
    return "embedding" in scheme.hooks() and not scheme.hooks() & ATTENTION_HOOKS


ATTENTION_HOOKS = frozenset(HOOKS) - {"embedding", "at_length"}


def attention_part(
    scheme: PositionScheme, params: Mapping[str, Array] | None
) -> tuple[PositionScheme, Mapping[str, Array] | None]:
    """Scheme and params for attention over tokens that carry the scheme's embedding already.

    ``NoPE()`` without params where the embedding is all there is.
    """
    return (NoPE(), None) if embeds_only(scheme) else (scheme, params)


def has_transform(scheme: PositionScheme) -> bool:
    """Whether a scheme changes queries and keys."""
    return "transform" in scheme.hooks()


def has_bias(scheme: PositionScheme) -> bool:
    """Whether a scheme has the hook for a bias."""
    return "bias" in scheme.hooks()


def has_features(scheme: PositionScheme) -> bool:
    """Whether a scheme has features of tokens."""
    return bool(scheme.hooks() & {"hidden_features", "query_features", "key_features"})


def reads_features(scheme: PositionScheme) -> bool:
    """Whether the bias may read features of tokens, or places on several axes."""
    return scheme.reads_features()


def check_batches(**positions: Array) -> int:
    """The batch size that arrays ``(L,)`` or ``(B, L)`` agree on; 1 if none has a batch."""
    sizes = {name: p.shape[0] for name, p in positions.items() if len(p.shape) == 2}
    batch: int = max(sizes.values()) if sizes else 1  # torch's compiler knows no max(default=1)
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
    """Merged params and constants on the device of ``like``, and the working dtype."""
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
