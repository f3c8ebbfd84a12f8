"""The features of the queries and of the keys of one call, given or computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posenc.apply.feature_needs import Specs, by_role, lookback_of, own_tokens
from posenc.attn.earlier import with_earlier
from posenc.attn.segment_sums import segment_sums
from posenc.contract.operations import cumulative_sum, device, is_numpy
from posenc.contract.params import Params, as_mapping, is_floating
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme, Role
from posenc.contract.tokens import Tokens
from posenc.positions.integers import concrete_values, from_numpy

FeatureArrays = dict[str, Array]


def side_features(
    scheme: PositionScheme,
    params: Params,
    vectors: tuple[Array | None, Array | None],
    sides: tuple[Tokens, Tokens],
    *,
    given: tuple[Mapping[str, Array] | None, Mapping[str, Array] | None],
    x: Array | None,
    q_x: Array | None,
    aligned: bool,
    k_transformed: bool,
    scale: float,
    xp: Namespace,
    x_before: Array | None = None,
) -> tuple[FeatureArrays, FeatureArrays]:
    """Features of queries and of keys, computed unless the caller gives them.

    ``vectors``, ``sides`` and ``given`` are pairs: for queries and for keys. ``aligned``: positions
    are the default.
    """
    name, specs = type(scheme).__name__, scheme.feature_specs()
    of_hidden, of_vectors = (by_role(specs, reads) for reads in ("hidden", "vectors"))
    hidden = bool(of_hidden["query"] or of_hidden["key"])
    (q, k), (q_side, k_side), (q_given, k_given) = vectors, sides, given
    if (q_given is None) != (k_given is None) and hidden:
        has, lacks = ("tokens", "queries") if q_given is None else ("queries", "tokens")
        raise ValueError(f"{has}.features is given without {lacks}.features; give both or neither")
    key: FeatureArrays = {}
    if k_given is None and hidden:
        x = _check_hidden("tokens.x", x, k, k_side, name, "K", xp)
        wide = x
        count = lookback_of(specs)
        if count:
            in_order = aligned and k_side.seg is None
            wide = with_earlier(x, count, None if in_order else k_side, before=x_before, xp=xp)
        key |= _hidden_features("tokens.x", scheme, of_hidden["key"], wide, count, params, xp)
    if of_vectors["key"] and not (k_given is not None and k_transformed):
        if k is None:
            raise ValueError(f"{name} has features of keys: give k")
        if k_transformed and Hook.TRANSFORM in scheme.hooks():
            raise ValueError(
                f"k_transformed=True: {name} has features of keys, which need keys before the "
                "transform; cache these features and give tokens.features"
            )
        key |= _vector_features(of_vectors["key"], scheme, k, k_side, scale, params, xp)
    key = _check_features(key, "key", k_side, q, k, params.dtype, xp)
    sums: FeatureArrays = {}
    for each, spec in specs.items():
        if spec.cumulative and each in key:
            key[each], sums[each] = _cumulative_sums(key[each], q_side, k_side, aligned, xp)
    query: FeatureArrays = dict(sums)
    if q_given is None and x is not None and of_hidden["query"]:
        query |= _hidden_query_features(
            scheme, of_hidden["query"], params, q_side, k_side, x, q_x, name, xp
        )
    if of_vectors["query"]:
        if q is None:
            raise ValueError(f"{name} has features of queries: give q")
        query |= _vector_features(of_vectors["query"], scheme, q, q_side, scale, params, xp)
    query |= dict(as_mapping(q_given, "queries.features"))
    key |= dict(as_mapping(k_given, "tokens.features"))
    return (
        _check_features(query, "query", q_side, q, q, params.dtype, xp),
        _check_features(key, "key", k_side, q, k, params.dtype, xp),
    )


def _check_hidden(
    name: str,
    x: Array | None,
    tokens: Array | None,
    side: Tokens,
    scheme: str,
    size: str,
    xp: Namespace,
) -> Array:
    """``x`` as hidden states of the tokens of a side, with its shape and dtype checked."""
    length = side.pos.shape[-1]
    if x is None:
        raise ValueError(
            f"{scheme} reads hidden states: give tokens with x (B, K, C), or tokens and queries "
            "with features"
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


def _hidden_features(
    what: str,
    scheme: PositionScheme,
    specs: Specs,
    x: Array,
    most: int,
    params: Params,
    xp: Namespace,
) -> FeatureArrays:
    """Features of hidden states; an error that names the width if it does not fit the scheme.

    If a feature of keys looks back, ``x`` has the ``most`` tokens before each one.
    """
    wide = xp.astype(x, params.dtype)
    try:
        return {
            name: spec.compute(own_tokens(wide, most, spec.lookback), params=params, xp=xp)
            for name, spec in specs.items()
        }
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (
            TypeError,
            ValueError,
            RuntimeError,
        ):  # an error of a tracer or compiler
            raise
        width, sizes = x.shape[-1], {n: tuple(s.shape) for n, s in scheme.param_specs().items()}
        if any(width in shape for shape in sizes.values()):
            raise
        raise ValueError(
            f"{what} has hidden states of width C={width}, but {type(scheme).__name__} with "
            f"params {sizes} cannot compute features from them: {error}"
        ) from error


def _vector_features(
    specs: Specs,
    scheme: PositionScheme,
    vectors: Array,
    side: Tokens,
    scale: float,
    params: Params,
    xp: Namespace,
) -> FeatureArrays:
    """Features of queries or of keys before the transform."""
    pos, wide = _broadcast_pos(side, scheme.axes), xp.astype(vectors, params.dtype)
    return {
        name: spec.compute(wide, pos, scale=scale, params=params, xp=xp)
        for name, spec in specs.items()
    }


def _hidden_query_features(
    scheme: PositionScheme,
    specs: Specs,
    params: Params,
    query: Tokens,
    key: Tokens,
    x: Array,
    q_x: Array | None,
    name: str,
    xp: Namespace,
) -> FeatureArrays:
    """Features of queries, from ``q_x`` or from the tokens of ``x`` that they are."""

    def compute(hidden: Array, what: str = "tokens.x") -> FeatureArrays:
        return _hidden_features(what, scheme, specs, hidden, 0, params, xp)

    if q_x is not None:
        return compute(_check_hidden("queries.x", q_x, x, query, name, "Q", xp), "queries.x")
    if query.pos.shape[-1] == key.pos.shape[-1] and _same_tokens(query, key, xp):
        return compute(x)
    raise ValueError(
        f"{name} reads hidden states of the queries' tokens: give queries with x (B, Q, C), "
        "because positions do not tell which of the tokens they are"
    )


def _same_tokens(query: Tokens, key: Tokens, xp: Namespace) -> bool:
    """Whether queries and keys are known to be the same tokens in the same order."""
    if query.pos is not key.pos:
        q_pos, k_pos = concrete_values(query.pos, xp), concrete_values(key.pos, xp)
        if q_pos is None or k_pos is None or not np.array_equal(q_pos, k_pos):
            return False
    if query.seg is None or key.seg is None or query.seg is key.seg:
        return True
    q_seg, k_seg = concrete_values(query.seg, xp), concrete_values(key.seg, xp)
    if q_seg is None or k_seg is None:
        return False
    # Padding may have different segments as a query and as a key; then no key or query matches it.
    differ = np.broadcast_to(q_seg != k_seg, np.broadcast_shapes(q_seg.shape, k_seg.shape))
    queries, keys = (np.broadcast_to(seg, differ.shape)[differ] for seg in (q_seg, k_seg))
    return not np.any(np.isin(queries, k_seg) & np.isin(keys, q_seg))


def _cumulative_sums(
    values: Array, query: Tokens, key: Tokens, aligned: bool, xp: Namespace
) -> tuple[Array, Array]:
    """Cumulative sums of a feature of keys, at the keys and at the queries."""
    if not aligned or key.seg is not None:
        return segment_sums(values, key, query, xp=xp)
    # NumPy adds one token after the other: 65536 gates of FoX would be off by 0.3 in float32. Other
    # libraries add in a tree or in float64.
    exact = xp.astype(values, xp.float64) if is_numpy(xp) else values
    sums = xp.astype(cumulative_sum(exact, axis=2, xp=xp), values.dtype, copy=False)
    first = values.shape[2] - query.pos.shape[-1]
    return sums, sums[:, :, first:, ...]


def _check_features(
    features: Mapping[str, Array],
    role: Role,
    side: Tokens,
    q: Array | None,
    tokens: Array | None,
    dtype: Any,
    xp: Namespace,
) -> FeatureArrays:
    """Features in the working dtype, each ``(B, H, L)`` or ``(B, H, L, M)``, with shapes checked.

    ``tokens`` are the vectors of the side: ``q`` or the keys.
    """
    length, checked = side.pos.shape[-1], {}
    for name, given in features.items():
        what = f"feature {name!r} of the {role}"
        array = from_numpy(given, xp=xp, device=device(side.pos))
        if not hasattr(array, "shape"):
            raise TypeError(f"{what} must be an array, got {type(array).__name__}")
        shape = tuple(array.shape)
        if len(shape) not in (3, 4) or shape[2] != length:
            accepted = f"(B, H, {length}) or (B, H, {length}, M)"
            raise ValueError(f"{what} must be {accepted}, got {shape}")
        if q is not None and tokens is not None:
            heads, token_heads = q.shape[1], tokens.shape[1]
            if shape[1] == token_heads and token_heads != heads and token_heads != 1:
                array = xp.repeat(array, heads // token_heads, axis=1)  # grouped-query keys
            elif shape[1] != 1 and shape[1] != heads:  # torch's compiler answers "in" wrongly
                raise ValueError(f"{what} must have {heads} heads, got {shape}")
            if shape[0] != 1 and shape[0] != q.shape[0]:
                raise ValueError(f"{what} must have batch {q.shape[0]}, got {shape}")
        checked[name] = xp.astype(array, dtype, copy=False)
    return checked


def _broadcast_pos(side: Tokens, axes: int) -> Array:
    """Positions broadcastable to ``(B, H, L)``, or places broadcastable to ``(B, H, L, axes)``."""
    pos, unbatched = side.encoded_pos, 1 if axes == 1 else 2
    return pos if len(pos.shape) == unbatched else pos[:, None, ...]
