"""Features of tokens: what a scheme knows of them beside their positions.

Each is computed once per token, from its hidden state or from its query or key vector. Those that a
scheme calls ``cumulative`` are summed in the order of positions, within a segment: FoX (arXiv
2503.02130) and CABLE (arXiv 2503.08067) bias a score by the difference of such sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
from array_api_compat import array_namespace, device

from posenc.attn.segment_sums import Tokens, segment_sums
from posenc.attn.side import Side
from posenc.checks import check_scheme
from posenc.evaluate import has_features, positions_as_places, prepare_params
from posenc.params import Params, as_mapping, is_floating, working_dtype
from posenc.positions import as_integers, as_places, as_positions, concrete_values, from_numpy
from posenc.protocol import Array, Namespace, PositionScheme, Role

Found = dict[str, Array]
_USUAL = 16  # of a scheme that takes any width
_ROLES: tuple[Role, Role] = ("query", "key")


def features(
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    *,
    x: Array | None = None,
    q: Array | None = None,
    k: Array | None = None,
    pos: Array | None = None,
    seg: Array | None = None,
    axes: Array | None = None,
    carry: Mapping[str, Array] | None = None,
    scale: float | None = None,
    xp: Namespace | None = None,
) -> tuple[Found, Found]:
    """Features of tokens as queries and as keys: ``q_features`` and ``k_features`` of attention.

    For a cache, which keeps those of keys, and for a sequence that is cut afterwards.

    Parameters
    ----------
    x
        Hidden states ``(B, L, C)``, for a scheme with ``hidden_features``.
    q, k
        Queries ``(B, H, L, D)`` and keys ``(B, Hk, L, D)`` of the same tokens, before any
        transform, for a scheme with ``query_features`` or ``key_features``.
    pos, seg
        Integer positions and segments of the tokens, ``(L,)`` or ``(B, L)``. A sum is that of all
        tokens of the segment up to the position. Default: in order, one segment.
    axes
        Places ``(L, axes)`` or ``(B, L, axes)``. Default: the position on every axis.
    carry
        By name, the sums ``(B, H)`` or ``(B, H, M)`` over tokens that came before these: the last
        ones of ``k_features``. Without segments.
    scale
        What scores are multiplied by. Default: ``scheme.scale(D)``.

    Returns
    -------
    Two mappings, name to ``(B, H, L)`` or ``(B, H, L, M)``, in float32, or in float64 if an
    argument is. ``({}, {})`` for a scheme without features.

    Raises
    ------
    TypeError, ValueError
        A wrong or missing argument, by name, value and what is accepted.
    """
    check_scheme(scheme)
    given = [a for a in (x, q, k) if a is not None]
    if not has_features(scheme):
        return {}, {}
    xp = xp or array_namespace(*given, *as_mapping(params).values())
    if not given:
        raise ValueError(f"{type(scheme).__name__} has features: give x, or q and k")
    tokens = x if x is not None else given[0]
    length = tokens.shape[1] if x is not None else tokens.shape[2]
    work = working_dtype([*given, *as_mapping(params).values()], xp=xp)
    arrays, work = prepare_params(scheme, params, like=tokens, dtype=work, xp=xp)
    here = device(tokens)
    at = xp.arange(length, dtype=xp.int32, device=here) if pos is None else pos
    at = as_positions("pos", at, device=here, xp=xp)
    own = None if seg is None else as_integers("seg", seg, device=here, xp=xp)
    for name, one in (("pos", at), ("seg", own)):
        batched = one is not None and len(one.shape) == 2 and one.shape[0] != 1
        if one is not None and (
            one.shape[-1] != length or (batched and one.shape[0] != tokens.shape[0])
        ):
            raise ValueError(f"{name} {tuple(one.shape)} does not fit tokens {tuple(tokens.shape)}")
    places = None
    if axes is not None:
        places = as_places("axes", axes, scheme.axes, length, device=here, xp=xp)
    elif scheme.axes > 1:
        places = positions_as_places(at, scheme.axes, xp=xp)
    if carry is not None and seg is not None:
        raise ValueError(
            "carry is given with seg: sums are carried into one segment; leave out seg"
        )
    side = Side(at, own, places, {})
    if scale is None:
        wide = q if q is not None else k
        scale = 1.0 if wide is None else scheme.scale(wide.shape[3])
    found = side_features(
        scheme, Params(arrays, work), (q, k), (side, side), given=(None, None), x=x, q_x=x,
        aligned=pos is None, k_transformed=False, scale=scale, xp=xp,
    )  # fmt: skip
    return found if carry is None else _carried(scheme, found, carry, work, xp)


def side_features(
    scheme: PositionScheme,
    params: Params,
    vectors: tuple[Array | None, Array | None],
    sides: tuple[Side, Side],
    *,
    given: tuple[Mapping[str, Array] | None, Mapping[str, Array] | None],
    x: Array | None,
    q_x: Array | None,
    aligned: bool,
    k_transformed: bool,
    scale: float,
    xp: Namespace,
) -> tuple[Found, Found]:
    """Features of queries and of keys, computed unless they are given.

    ``aligned``: positions are the default.
    """
    hooks, name = scheme.hooks(), type(scheme).__name__
    (q, k), (q_side, k_side), (q_given, k_given) = vectors, sides, given
    if (q_given is None) != (k_given is None) and "hidden_features" in hooks:
        has, lacks = ("k", "q") if q_given is None else ("q", "k")
        raise ValueError(f"{has}_features is given without {lacks}_features; give both or neither")
    key: Found = {}
    if k_given is None and "hidden_features" in hooks:
        x = _checked_x("x", x, k, k_side, name, "K", xp)
        key |= _of_hidden("x", scheme, x, "key", params, xp)
    if "key_features" in hooks and not (k_given is not None and k_transformed):
        if k is None:
            raise ValueError(f"{name} has features of keys: give k")
        if k_transformed and "transform" in hooks:
            raise ValueError(
                f"k_transformed=True: {name} has features of keys, which come from keys that are "
                "not transformed; cache them and give k_features"
            )
        pos = _fitting(k_side, scheme.axes)
        wide = xp.astype(k, params.dtype)
        key |= scheme.key_features(wide, pos, scale=scale, params=params, xp=xp)
    key = _checked(key, "key", k_side, q, k, params.dtype, xp)
    sums: Found = {}
    for each in scheme.cumulative:
        if each in key:
            key[each], sums[each] = _summed(key[each], q_side, k_side, aligned, xp)
        elif k_given is None:
            there = ", ".join(key) or "none"
            raise ValueError(
                f"{name}.cumulative has {each!r}, which is no feature of keys; there are: {there}"
            )
    query: Found = dict(sums)
    if q_given is None and "hidden_features" in hooks and x is not None:
        query |= _of_queries(scheme, params, q_side, k_side, x, q_x, aligned, name, xp)
    if "query_features" in hooks:
        if q is None:
            raise ValueError(f"{name} has features of queries: give q")
        pos = _fitting(q_side, scheme.axes)
        wide = xp.astype(q, params.dtype)
        query |= scheme.query_features(wide, pos, scale=scale, params=params, xp=xp)
    query |= dict(as_mapping(q_given, "q_features"))
    key |= dict(as_mapping(k_given, "k_features"))
    return (
        _checked(query, "query", q_side, q, q, params.dtype, xp),
        _checked(key, "key", k_side, q, k, params.dtype, xp),
    )


def _checked_x(
    name: str,
    x: Array | None,
    tokens: Array | None,
    side: Side,
    scheme: str,
    size: str,
    xp: Namespace,
) -> Array:
    """Hidden states of the tokens of a side."""
    length = side.pos.shape[-1]
    if x is None:
        raise ValueError(
            f"{scheme} reads hidden states: give x (B, K, C) of the keys' tokens, or q_features "
            "and k_features"
        )
    x = from_numpy(x, xp=xp, device=device(side.pos))
    if not hasattr(x, "shape") or len(x.shape) != 3 or not is_floating(x, xp):
        kind = f"{tuple(x.shape)} of {x.dtype}" if hasattr(x, "shape") else type(x).__name__
        raise ValueError(f"{name} must be floating, (B, {size}, C), got {kind}")
    batch = x.shape[0] if tokens is None else tokens.shape[0]
    if (x.shape[0], x.shape[1]) != (batch, length):
        expected = f"(B, {size}, C) = ({batch}, {length}, C)"
        raise ValueError(f"{name} must be {expected}, got {tuple(x.shape)}")
    return x


def _of_hidden(
    what: str, scheme: PositionScheme, x: Array, role: Role, params: Params, xp: Namespace
) -> Found:
    """Features from hidden states; of another width than the scheme's, an error that says so."""
    wide = xp.astype(x, params.dtype)
    try:
        return dict(scheme.hidden_features(wide, role=role, params=params, xp=xp))
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, RuntimeError):  # of a tracer or a compiler
            raise
        width, sizes = x.shape[2], {n: tuple(s.shape) for n, s in scheme.param_specs().items()}
        if any(width in shape for shape in sizes.values()):
            raise
        raise ValueError(
            f"{what} has hidden states of width C={width}, of which {type(scheme).__name__} with "
            f"params {sizes} makes no features: {error}"
        ) from error


def _of_queries(
    scheme: PositionScheme,
    params: Params,
    query: Side,
    key: Side,
    x: Array,
    q_x: Array | None,
    aligned: bool,
    name: str,
    xp: Namespace,
) -> Found:
    """Features of queries from the hidden states of their tokens."""

    def found(own: Array, what: str = "x") -> Found:
        return _of_hidden(what, scheme, own, "query", params, xp)

    if q_x is not None:
        return found(_checked_x("q_x", q_x, x, query, name, "Q", xp), "q_x")
    q_len, k_len = query.pos.shape[-1], key.pos.shape[-1]
    if aligned:
        return found(x[:, k_len - q_len :, :])
    if not found(x[:, :1, :]):  # first: an exported program keeps what it asks of lengths
        return {}
    if q_len == k_len and _same_tokens(query, key, xp):
        return found(x)
    raise ValueError(
        f"{name} reads hidden states of the queries' tokens: give q_x (B, Q, C) beside x, because "
        "positions do not tell which tokens the queries are"
    )


def _same_tokens(query: Side, key: Side, xp: Namespace) -> bool:
    """Whether queries and keys are the same tokens in the same order, where that can be seen."""
    if query.pos is not key.pos:
        here, there = concrete_values(query.pos, xp), concrete_values(key.pos, xp)
        if here is None or there is None or not np.array_equal(here, there):
            return False
    if query.seg is None or key.seg is None or query.seg is key.seg:
        return True
    here, there = concrete_values(query.seg, xp), concrete_values(key.seg, xp)
    if here is None or there is None:
        return False
    # A pad carries another segment as a query than as a key; then it sees nothing, or is not seen.
    apart = np.broadcast_to(here != there, np.broadcast_shapes(here.shape, there.shape))
    queries, keys = (np.broadcast_to(a, apart.shape)[apart] for a in (here, there))
    return not np.any(np.isin(queries, there) & np.isin(keys, here))


def _summed(
    values: Array, query: Side, key: Side, aligned: bool, xp: Namespace
) -> tuple[Array, Array]:
    """Sums of a feature of keys, where keys and where queries stand."""
    if not aligned or key.seg is not None:
        return segment_sums(values, Tokens(key.pos, key.seg), Tokens(query.pos, query.seg), xp=xp)
    sums = xp.cumulative_sum(values, axis=2)
    first = values.shape[2] - query.pos.shape[-1]
    return sums, sums[:, :, first:, ...]


def _checked(
    found: Mapping[str, Array],
    role: Role,
    side: Side,
    q: Array | None,
    tokens: Array | None,
    dtype: Any,
    xp: Namespace,
) -> Found:
    """Features in the working float: ``(B, H, L)`` or ``(B, H, L, M)`` each."""
    length, checked = side.pos.shape[-1], {}
    for name, given in found.items():
        what = f"feature {name!r} of the {role}"
        array = from_numpy(given, xp=xp, device=device(side.pos))
        if not hasattr(array, "shape"):
            raise TypeError(f"{what} must be an array, got {type(array).__name__}")
        shape = tuple(array.shape)
        if len(shape) not in (3, 4) or shape[2] != length:
            accepted = f"(B, H, {length}) or (B, H, {length}, M)"
            raise ValueError(f"{what} must be {accepted}, got {shape}")
        if q is not None and tokens is not None:
            heads, own = q.shape[1], tokens.shape[1]
            if shape[1] == own and own != heads and own != 1:  # of keys that heads share
                array = xp.repeat(array, heads // own, axis=1)
            elif shape[1] != 1 and shape[1] != heads:  # torch's compiler answers "in" wrongly
                raise ValueError(f"{what} must have {heads} heads, got {shape}")
            if shape[0] != 1 and shape[0] != q.shape[0]:
                raise ValueError(f"{what} must have batch {q.shape[0]}, got {shape}")
        checked[name] = xp.astype(array, dtype, copy=False)
    return checked


def _fitting(side: Side, axes: int) -> Array:
    """Positions that fit ``(B, H, L)``, or places that fit ``(B, H, L, axes)``."""
    where, own = side.encoded_pos, 1 if axes == 1 else 2
    return where if len(where.shape) == own else where[:, None, ...]


def _carried(
    scheme: PositionScheme,
    found: tuple[Found, Found],
    carry: Mapping[str, Array],
    dtype: Any,
    xp: Namespace,
) -> tuple[Found, Found]:
    """Sums that go on from those of earlier tokens."""
    query, key = found
    for name, before in as_mapping(carry, "carry").items():
        if name not in scheme.cumulative:
            known = ", ".join(scheme.cumulative) or "none"
            raise ValueError(f"carry has {name!r}, which is not summed; accepted: {known}")
        expected = tuple(size for axis, size in enumerate(key[name].shape) if axis != 2)
        if tuple(before.shape) != expected:
            raise ValueError(f"carry[{name!r}] must be {expected}, got {tuple(before.shape)}")
        more = xp.expand_dims(xp.astype(before, dtype), axis=2)
        query[name], key[name] = query[name] + more, key[name] + more
    for name in scheme.cumulative:
        if name not in carry:
            raise ValueError(f"carry lacks {name!r}, which is summed")
    return query, key


def hidden_width(scheme: PositionScheme, params: Mapping[str, Array]) -> int:
    """The width of hidden states that a scheme takes: one of the sizes of its NumPy params, found
    by trying; 0 for a scheme that reads none.
    """
    if "hidden_features" not in scheme.hooks():
        return 0
    arrays, work = prepare_params(scheme, params, like=np.zeros(1), dtype=None, xp=numpy_namespace)
    whole = Params(arrays, work)
    sizes = {size for spec in scheme.param_specs().values() for size in spec.shape}
    for width in sorted(sizes | {_USUAL}, reverse=True):
        x = np.zeros((1, 1, width), np.float32)
        try:
            for role in _ROLES:
                scheme.hidden_features(x, role=role, params=whole, xp=numpy_namespace)
        except (TypeError, ValueError, IndexError):
            continue
        return width
    raise ValueError(
        f"width: the features of {scheme} take hidden states of none of {sorted(sizes)}"
    )
