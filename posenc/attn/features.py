"""Features of tokens: named arrays that a bias or transform reads besides positions.

A feature is computed once per token, from its hidden state or from its query or key vector. A
``cumulative`` one is summed in the order of positions, within a segment. FoX (arXiv 2503.02130) and
CABLE (arXiv 2503.08067) bias a score by the difference of such sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.apply.feature_needs import has_features, lookback, summed_features
from posenc.apply.shapes import positions_as_places, prepare_params
from posenc.attn.arguments import Arguments, as_booleans, without_padding
from posenc.attn.side_features import FeatureArrays, side_features
from posenc.contract.checks import check_scheme
from posenc.contract.operations import device, own_dtypes, shared_namespace
from posenc.contract.params import Params, as_mapping, working_dtype
from posenc.contract.protocol import Array, Namespace, PositionScheme
from posenc.contract.tokens import Tokens
from posenc.positions.integers import as_integers, as_places, as_positions, from_numpy


def features(
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    tokens: Tokens | None = None,
    *,
    q: Array | None = None,
    k: Array | None = None,
    carry: Mapping[str, Array] | None = None,
    x_before: Array | None = None,
    scale: float | None = None,
    xp: Namespace | None = None,
) -> tuple[Tokens, Tokens]:
    """The same tokens with their features: as queries, and as keys.

    ``queries, keys = features(scheme, params, Tokens(pos=pos, x=x))``, then
    ``attention(..., tokens=keys, queries=queries)``. A cache keeps the keys:
    ``cache.concat(keys)``.

    Parameters
    ----------
    tokens
        Hidden states ``x`` for a scheme whose features read them; positions and segments, within
        which a cumulative sum runs up to each position (default: in order, one segment); places.
    q, k
        Queries ``(B, H, L, D)`` and keys ``(B, Hk, L, D)`` of the same tokens, before
        ``transform``, for a scheme whose features read them.
    carry
        Name -> cumulative sum over all earlier tokens, ``(B, H)`` or ``(B, H, M)``: the last values
        of the cached ``features``; 0 in a row whose tokens so far are padding. Not with segments.
    x_before
        Hidden states ``(B, n, C)`` of the last tokens before these, for a scheme with a
        ``lookback``; 0 for padding, of which nothing else tells here. Not with segments. Default:
        there are none.
    scale
        Factor of the scores. Default: ``scheme.scale(D)``.

    Returns
    -------
    Two ``Tokens``, whose ``features`` are name -> ``(B, H, L)`` or ``(B, H, L, M)``, in float32, or
    in float64 if an argument is float64; ``tokens`` itself for a scheme without features.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong or missing; the message has its name, its value, and what is accepted.
    """
    check_scheme(scheme)
    given = Arguments(tokens=tokens).check().of_keys
    x = given.x
    read = {n: a for n, a in (("tokens.x", x), ("q", q), ("k", k)) if a is not None}
    floating = [*read.values()]
    if not has_features(scheme):
        return given, given
    if not floating:
        raise ValueError(f"{type(scheme).__name__} has features: give tokens with x, or q and k")
    xp = xp or shared_namespace(**read)
    vectors = x if x is not None else floating[0]
    length = vectors.shape[1] if x is not None else vectors.shape[2]
    work = working_dtype([*floating, *as_mapping(params).values()], xp=xp)
    arrays, work = prepare_params(scheme, params, like=vectors, dtype=work, xp=xp)
    side = _complete(given, scheme, vectors, length, xp)
    for name, given_before in (("carry", carry), ("x_before", x_before)):
        if given_before is not None and side.seg is not None:
            part = "seg" if given.exists is None else "exists"
            raise ValueError(
                f"{name} is given with tokens.{part}, but it continues one segment of tokens that "
                f"all exist; leave out tokens.{part}"
            )
    if carry is not None and x_before is None and lookback(scheme):
        raise ValueError(
            f"carry is given without x_before, but {type(scheme).__name__} reads hidden states of "
            f"{lookback(scheme)} earlier tokens"
        )
    if x_before is not None:
        x_before = _check_before(x_before, x, scheme, xp)
    if scale is None:
        of_scale = q if q is not None else k
        scale = 1.0 if of_scale is None else scheme.scale(of_scale.shape[3])
    with own_dtypes(xp):
        both = side_features(
            scheme, Params(arrays, work), (q, k), (side, side), given=(None, None), x=x, q_x=x,
            x_before=x_before, aligned=given.pos is None, k_transformed=False, scale=scale, xp=xp,
        )  # fmt: skip
    query, key = both if carry is None else _add_carry(scheme, both, carry, work, xp)
    return given.with_features(query), given.with_features(key)


def _complete(
    tokens: Tokens, scheme: PositionScheme, vectors: Array, length: int, xp: Namespace
) -> Tokens:
    """Checked positions, segments and places of tokens; those of padding are no segment."""
    here, batch = device(vectors), vectors.shape[0]
    pos = xp.arange(length, dtype=xp.int32, device=here) if tokens.pos is None else tokens.pos
    pos = as_positions("tokens.pos", pos, device=here, xp=xp)
    seg = tokens.seg
    if seg is not None:
        seg = as_integers("tokens.seg", seg, device=here, xp=xp)
    for name, array in (("tokens.pos", pos), ("tokens.seg", seg)):
        if array is None:
            continue
        batched = len(array.shape) == 2 and array.shape[0] != 1
        if array.shape[-1] != length or (batched and array.shape[0] != batch):
            shapes = f"{tuple(array.shape)} does not fit tokens {tuple(vectors.shape)}"
            raise ValueError(f"{name} {shapes}")
    places = tokens.places
    if places is not None:
        places = as_places("tokens.places", places, scheme.axes, length, device=here, xp=xp)
    elif scheme.axes > 1:
        places = positions_as_places(pos, scheme.axes, xp=xp)
    if tokens.exists is not None:
        exists = as_booleans("tokens.exists", tokens.exists, length, batch, here, xp)
        _, seg = without_padding((None, seg), (None, exists), (length, length), here, xp)
    return Tokens(pos, seg, places, features={})


def _check_before(before: Array, x: Array | None, scheme: PositionScheme, xp: Namespace) -> Array:
    """``x_before`` as hidden states of tokens before those of ``x``."""
    if not lookback(scheme):
        raise ValueError(
            f"x_before: {type(scheme).__name__} reads hidden states of no earlier tokens; leave it "
            "out"
        )
    shape = tuple(getattr(before, "shape", ()))
    if x is None or len(shape) != 3 or (shape[0], shape[2]) != (x.shape[0], x.shape[2]):
        expected = "with tokens.x" if x is None else f"({x.shape[0]}, n, {x.shape[2]})"
        raise ValueError(f"x_before must be (B, n, C) = {expected}, got {shape}")
    return from_numpy(before, xp=xp, device=device(x))


def _add_carry(
    scheme: PositionScheme,
    features: tuple[FeatureArrays, FeatureArrays],
    carry: Mapping[str, Array],
    dtype: Any,
    xp: Namespace,
) -> tuple[FeatureArrays, FeatureArrays]:
    """Features whose cumulative sums continue those of earlier tokens."""
    query, key = features
    summed = summed_features(scheme)
    for name, before in as_mapping(carry, "carry").items():
        if name not in summed:
            known = ", ".join(summed) or "none"
            raise ValueError(f"carry has {name!r}, which is not summed; accepted: {known}")
        expected = tuple(size for axis, size in enumerate(key[name].shape) if axis != 2)
        if tuple(before.shape) != expected:
            raise ValueError(f"carry[{name!r}] must be {expected}, got {tuple(before.shape)}")
        more = xp.expand_dims(xp.astype(before, dtype), axis=2)
        query[name], key[name] = query[name] + more, key[name] + more
    for name in summed:
        if name not in carry:
            raise ValueError(f"carry lacks {name!r}, which is summed")
    return query, key
