"""The transform of queries and keys, and its table of angles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posenc.angles.rotary import check_rotary, rotary_tables
from posenc.apply.shapes import positions_as_places, prepare_params
from posenc.contract.checks import check_scheme
from posenc.contract.operations import device, hold, own_dtypes, shared_namespace
from posenc.contract.params import (
    Features,
    GroupedKeyParams,
    as_mapping,
    check_key_heads,
    check_params,
    head_count,
    head_views,
    of_keys,
)
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme, Role
from posenc.contract.tokens import Rotary, Tokens
from posenc.positions.integers import as_places, as_positions


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

    What else a scheme does to scores is not in it, such as a bias, a sink, or the transforms of
    regions (``scheme.hooks()`` says what there is); ``posenc.attention`` does all. It is faster in
    PyTorch or JAX if ``posenc_torch`` or ``posenc_jax`` is imported.

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

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    KeyError
        A feature that the transform reads is not given.
    """
    check_scheme(scheme)
    xp = xp or shared_namespace(x=x)
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
    with own_dtypes(xp):
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
    xp = xp or shared_namespace(pos=given)
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
    with own_dtypes(xp):
        tables = hold(scheme.rotary(at, dtype=work, params=views, xp=xp), xp)
    return Rotary(scheme, tables, regions)


def _length_of_places(places: Array, axes: int) -> int:
    """The number of tokens in ``(L, axes)`` or ``(B, L, axes)``, or without the last axis."""
    shape = tuple(places.shape)
    length: int = shape[-2] if len(shape) > 1 and shape[-1] == axes else shape[-1]
    return length


def _params_of(part: PositionScheme, params: Mapping[str, Array] | None) -> dict[str, Array]:
    """The params that a region of a scheme declares."""
    specs = part.param_specs()
    return {name: array for name, array in as_mapping(params).items() if name in specs}


def has_transform(scheme: PositionScheme) -> bool:
    """Whether a scheme transforms queries and keys."""
    return Hook.TRANSFORM in scheme.hooks()
