"""Prepare a call of attention: check its arguments, compute features and transforms."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from posenc.angles.rotary import check_rotary
from posenc.apply.bias import has_bias
from posenc.apply.feature_needs import has_features, reads_features
from posenc.apply.shapes import as_column
from posenc.apply.transform import has_transform, rotary, transformation
from posenc.attn.arguments import (
    Arguments,
    as_pairs,
    check_head_dims,
    check_heads,
    check_shapes,
    complete_sides,
)
from posenc.attn.call import Call
from posenc.attn.embedding_only import attention_part, embeds_only
from posenc.attn.key_order import with_ordered_keys
from posenc.attn.masks import Mask, check_parts, complete_mask
from posenc.attn.padding import zero_padding
from posenc.attn.regions import with_regions
from posenc.attn.shared import Shared, nothing_kept
from posenc.attn.side_features import side_features
from posenc.contract.checks import (
    check_flag,
    check_scale,
    check_scheme,
    check_softcap,
)
from posenc.contract.operations import device, is_compiling, shared_namespace
from posenc.contract.params import (
    PLACES,
    Params,
    as_mapping,
    check_params,
    merge_constants,
    of_keys,
    working_dtype,
)
from posenc.contract.protocol import Hook, PositionScheme, SchemeWarning
from posenc.contract.specs import Array, Namespace, Role
from posenc.contract.tokens import Rotary, Tokens
from posenc.positions.integers import concrete_values

_NOTHING = Arguments()


def prepare(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    causal: bool = False,
    given: Arguments = _NOTHING,
    *,
    skip_blocks: bool = True,
    shared: Shared | None = None,
    gather: Callable[[Array], Array] | None = None,
    xp: Namespace | None = None,
) -> Call:
    """Check the arguments of ``attention``, fill in defaults, and transform queries and keys.

    ``gather`` gives the segments of a whole sequence, if q and k are one part of it.
    """
    xp = xp or shared_namespace(q=q, k=k, v=v)
    check_scheme(scheme)
    check_shapes(q, k, v, xp=xp)
    check_heads(scheme, q)
    given = given.check(xp)
    if not check_flag("k_transformed", given.k_transformed):
        check_head_dims(q, k)
    work = working_dtype([q, k, v, *given.floats(), *as_mapping(params).values()], xp=xp)
    scheme, params = _scheme_in_attention(scheme, params, xp=xp)
    once = nothing_kept if shared is None else shared.made.once
    query, key, aligned, in_the_past = once(
        "sides", lambda: complete_sides(q, k, given, scheme, xp)
    )
    mask = once("mask", lambda: _mask(q, k, causal, given, query, key, xp))
    q, k = zero_padding(q, k, query, key, scheme, xp, gather)
    bits = 64 if work == xp.float64 else 32
    call = Call(
        scheme=scheme,
        xp=xp,
        dtype=work,
        q=q,
        k=k,
        v=v,
        arrays=merge_constants(scheme, params, dtype=work, device=device(q), xp=xp),
        query=query,
        key=key,
        aligned=aligned,
        keys_in_order=aligned and key.places is None,
        in_the_past=in_the_past,
        mask=mask,
        scale=check_scale(scheme.scale(q.shape[3]) if given.scale is None else given.scale, bits),
        softcap=None if given.softcap is None else check_softcap(given.softcap, bits),
        extra_bias=as_pairs("bias", given.bias, q, k, work, xp),
        wants_lse=check_flag("return_lse", given.return_lse),
        skip_blocks=check_flag("skip_blocks", skip_blocks),
        shared=shared,
    )
    _check_bias(call)
    if (advice := scheme.caution(causal=call.causal)) is not None:
        _warn(scheme, advice, xp)
    if has_features(scheme):
        call = _with_features(call, given)
    elif given.of_queries.features is not None or given.of_keys.features is not None:
        name = "tokens" if given.of_queries.features is None else "queries"
        raise ValueError(
            f"{type(scheme).__name__} has no features of tokens: leave out {name}.features"
        )
    hooks = scheme.hooks()
    if Hook.SINK in hooks:
        own = nothing_kept if has_features(scheme) else once
        call = replace(call, sink=own("sink", partial(_sink, call)))
    if Hook.REGIONS in hooks:
        _check_rotary(scheme, given)
        if shared is not None and given.of_keys.rotary is None:
            angles = _rotary_of_pass(call, params, given)[1]
            given = given._replace(tokens=replace(given.of_keys, rotary=angles))
        return with_regions(call, params, given, partial(prepare, gather=gather))
    call = _with_transform(call, params, given)
    return with_ordered_keys(call) if scheme.key_paths else call


def _mask(
    q: Array,
    k: Array,
    causal: bool,
    given: Arguments,
    query: Tokens,
    key: Tokens,
    xp: Namespace,
) -> Mask:
    """The checked mask of a call, in normal form."""
    mask = complete_mask(causal, given.window, given.mask)
    if mask.array is not None:
        mask = replace(mask, array=as_pairs("mask", mask.array, q, k, xp.bool, xp))
    if mask.parts:
        check_parts(mask, query, key, xp)
    return mask


def _check_bias(call: Call) -> None:
    """Check that no visible pair has a bias of ``inf``, where values are known on the host."""
    bias, xp = call.extra_bias, call.xp
    if bias is None or "cpu" not in str(getattr(bias, "device", None)).lower():
        return
    values = concrete_values(bias, xp)
    if values is None or not values.size or values.max() < math.inf:
        return
    visible = call.visible()
    seen = True if visible is None else concrete_values(visible, xp)
    found: Any = np.argwhere((values == math.inf) & seen) if seen is not None else ()
    if len(found):
        raise ValueError(
            f"bias must be finite or -inf (which masks a pair), got inf at "
            f"{tuple(int(n) for n in found[0])}; in {bias.dtype}, numbers above "
            f"{float(xp.finfo(bias.dtype).max):.3g} are inf"
        )


def _sink(call: Call) -> Array | None:
    """The logit of the scheme's sink, or None."""
    at = as_column(call.query.encoded_pos)
    sink = call.scheme.sink(at, params=call.views(), xp=call.xp)
    return None if sink is None else _squeeze_sink(sink, call.dtype, call.xp)


def _squeeze_sink(sink: Array, dtype: Any, xp: Namespace) -> Array:
    """A sink ``(B or 1, H or 1, Q or 1)``, from an array that broadcasts to ``(B, H, Q, 1)``."""
    missing = (1,) * (4 - len(sink.shape))
    return xp.astype(xp.reshape(sink, (*missing, *sink.shape))[..., 0], dtype, copy=False)


def _with_features(call: Call, given: Arguments) -> Call:
    """The call with the features of queries and keys, computed unless the caller gives them."""
    x, q_x = given.of_keys.x, given.of_queries.x
    the_last = q_x is None and (given.queries is None or call.aligned)
    if the_last and hasattr(x, "shape") and len(x.shape) == 3:
        q_x = x[:, call.k.shape[2] - call.q.shape[2] :, :]
    query, key = side_features(
        call.scheme,
        Params(call.arrays, call.dtype),
        (call.q, call.k),
        (call.query, call.key),
        given=(given.of_queries.features, given.of_keys.features),
        x=x,
        q_x=q_x,
        aligned=call.aligned,
        k_transformed=given.k_transformed,
        scale=call.scale,
        xp=call.xp,
    )
    return replace(
        call,
        query=call.query.with_features(query),
        key=call.key.with_features(key),
    )


def _with_transform(call: Call, params: Mapping[str, Array] | None, given: Arguments) -> Call:
    """The call with transformed queries and keys, and sides that hold what the bias reads."""
    scheme, xp = call.scheme, call.xp
    q, k, query, key = call.q, call.k, call.query, call.key
    if has_transform(scheme):
        q_rotary, k_rotary = _given_rotary(call, given)
        if call.shared is not None and q_rotary is None and k_rotary is None:
            q_rotary, k_rotary = _rotary_of_pass(call, params, given)
        elif q_rotary is None and k_rotary is None and _share_rotary(call, given):
            q_rotary = k_rotary = rotary(scheme, key.pos, params, dtype=q.dtype, xp=xp)
        q = _transform_side(scheme, q, query, "query", params, q_rotary, call.shared, xp)
        if not given.k_transformed:
            k = _transform_side(scheme, k, key, "key", params, k_rotary, call.shared, xp)
        elif call.aligned:
            _warn(scheme, _CACHE_WITHOUT_POSITIONS, xp)
    else:
        _check_rotary(scheme, given)
    check_head_dims(q, k, transformed=True)
    read_by_keys_only = of_keys(scheme)
    unchanged = q is call.q and k is call.k and not query.features and not key.features
    if unchanged and scheme.axes == 1 and not read_by_keys_only:
        return call
    return replace(
        call,
        q=q,
        k=k,
        arrays={name: a for name, a in call.arrays.items() if name not in read_by_keys_only},
        query=_side_for_bias(scheme, query),
        key=_side_for_bias(scheme, key),
    )


def _rotary_of_pass(
    call: Call, params: Mapping[str, Array] | None, given: Arguments
) -> tuple[Rotary | None, Rotary | None]:
    """Angles at the positions of the queries, and of the keys unless these are transformed."""
    shared, scheme, xp = call.shared, call.scheme, call.xp
    assert shared is not None
    if not scheme.hooks() & {Hook.ROTARY, Hook.REGIONS}:
        return None, None
    # Learned angles are made for each, so that their gradients add up as in a call alone.
    same = not scheme.param_specs() and given.queries is None
    same = same and bool(call.q.shape[2] == call.k.shape[2])

    def made(side: Tokens, role: str, dtype: Any) -> Rotary | None:
        tokens = Tokens(side.pos, places=side.places)
        return shared.of_pass.once(
            ("rotary", shared.rotary_key, role, str(dtype), side.pos.shape[-1]),
            lambda: rotary(scheme, tokens, params, dtype=dtype, xp=xp),
        )

    of_keys = None
    if not given.k_transformed:
        of_keys = made(call.key, "key", call.k.dtype)
    if same and of_keys is not None and call.q.dtype == call.k.dtype:
        return of_keys, of_keys
    return made(call.query, "query", call.q.dtype), of_keys


def _given_rotary(call: Call, given: Arguments) -> tuple[Rotary | None, Rotary | None]:
    """What the caller made for the positions of the queries, and of the keys."""
    of_keys = given.of_keys.rotary
    if given.queries is not None or of_keys is None:
        return given.of_queries.rotary, of_keys
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    if q_len == k_len or not isinstance(of_keys, Rotary):
        return of_keys, of_keys
    last = slice(k_len - q_len, None)
    return of_keys.map(lambda table: table[..., last, :]), of_keys


def _share_rotary(call: Call, given: Arguments) -> bool:
    """Whether queries and keys have the same positions, and arrays of heads do not differ."""
    scheme, q, k = call.scheme, call.q, call.k
    if not call.aligned or given.of_keys.places is not None or given.k_transformed:
        return False
    of_heads = scheme.param_specs() or scheme.constants()
    if Hook.ROTARY not in scheme.hooks() or of_heads or q.dtype != k.dtype:
        return False
    # Last, because an exported program keeps every condition on lengths that it evaluates.
    return bool(q.shape[2] == k.shape[2])


def _transform_side(
    scheme: PositionScheme,
    x: Array,
    side: Tokens,
    role: Role,
    params: Mapping[str, Array] | None,
    rotary: Rotary | None,
    shared: Shared | None,
    xp: Namespace,
) -> Array:
    turn = transformation(
        scheme,
        x,
        side.encoded_pos,
        role=role,
        params=params,
        features=side.features,
        rotary=rotary,
        xp=xp,
    )
    if shared is not None:
        shared.made.keep(("turn", role), turn)
    return turn(x)


def _check_rotary(scheme: PositionScheme, given: Arguments) -> None:
    """Check what the caller gives to a scheme that does not transform, or has regions that do."""
    if given.of_queries.rotary is not None:
        check_rotary(given.of_queries.rotary, scheme, "query")
    if given.of_keys.rotary is not None:
        check_rotary(given.of_keys.rotary, scheme, "key")


def _side_for_bias(scheme: PositionScheme, side: Tokens) -> Tokens:
    """The side with the features that the bias reads, and places on several axes as a feature."""
    read = reads_features(scheme) or bool(scheme.hooks() & _READ_FEATURES)
    features = side.features if read else {}
    if scheme.axes == 1:
        return side.with_features(features)
    if side.places is not None and features is side.features and has_bias(scheme):
        places = side.places[None, ...] if len(side.places.shape) == 2 else side.places
        features = {**features, PLACES: places[:, None, :, :]}
    return Tokens(side.pos, side.seg, features=features)


_READ_FEATURES = frozenset({Hook.CHANNEL_DECAY, Hook.ADJUST_SCORES})  # beside a bias

_CACHE_WITHOUT_POSITIONS = (
    "k_transformed=True without tokens.pos assumes that k holds all keys from position 0 on; "
    "if the cache dropped its first keys, give the positions"
)


_EMBEDS_ONLY = (
    "it acts on token embeddings only, so attention adds nothing; add "
    "posenc.embedding(scheme, pos) to the tokens, and use posenc.NoPE() here"
)


def _scheme_in_attention(
    scheme: PositionScheme, params: Mapping[str, Array] | None, *, xp: Namespace
) -> tuple[PositionScheme, Mapping[str, Array] | None]:
    """Scheme and params; ``NoPE()``, with a warning, if the scheme acts on embeddings only."""
    if not embeds_only(scheme):
        return scheme, params
    if as_mapping(params):
        check_params(scheme, params, xp=xp)
    _warn(scheme, _EMBEDS_ONLY, xp)
    return attention_part(scheme, params)


def may_warn(scheme: PositionScheme, causal: bool, given: Arguments) -> bool:
    """Whether ``prepare`` warns of such a call at default positions."""
    if embeds_only(scheme) or scheme.caution(causal=causal) is not None:
        return True
    return given.k_transformed and has_transform(scheme)


def _warn(scheme: PositionScheme, advice: str, xp: Namespace) -> None:
    """Issue a ``SchemeWarning`` at the caller's line, except while PyTorch compiles."""
    if is_compiling(xp):
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame):
        frame, level = frame.f_back, level + 1
    message = f"attention with {type(scheme).__name__}: {advice}"
    warnings.warn(message, SchemeWarning, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    """Whether a frame belongs to posenc or one of its backends."""
    return str(frame.f_globals.get("__name__")).partition(".")[0].startswith("posenc")
