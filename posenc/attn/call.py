"""``Call``: the checked and completed arguments from which every implementation computes."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Unpack

import numpy as np
from array_api_compat import device

from posenc.attn.arguments import (
    Arguments,
    as_pairs,
    check_head_dims,
    check_heads,
    check_shapes,
    complete_sides,
    namespace,
)
from posenc.attn.features import side_features
from posenc.attn.masks import FirstTokens, Mask, as_mask, check_mask_result
from posenc.attn.options import Options, float_arrays
from posenc.attn.padding import zero_padding
from posenc.attn.side import Side
from posenc.checks import (
    check_count,
    check_flag,
    check_scale,
    check_scheme,
    check_softcap,
    check_window,
)
from posenc.evaluate import (
    as_column,
    as_row,
    attention_part,
    dense_bias,
    embeds_only,
    has_bias,
    has_features,
    has_transform,
    rotary,
    transform_at,
)
from posenc.params import (
    Features,
    Params,
    ReadTable,
    as_mapping,
    check_params,
    head_views,
    merge_constants,
    of_keys,
    tile_views,
    working_dtype,
)
from posenc.positions import concrete_values, is_compiling, visible
from posenc.protocol import Array, Namespace, PositionScheme, Role, SchemeWarning, Window
from posenc.rotary_tables import Rotary, check_rotary


@dataclass(frozen=True)
class Call:
    """One call of attention, with checked arguments and defaults filled in.

    Attributes
    ----------
    scheme, xp, dtype
        The scheme, the array namespace, and the working dtype: float32 or float64.
    q, k, v
        ``(B, H, Q, E)``, ``(B, Hk, K, E)``, ``(B, Hk, K, Dv)``; q and k are already transformed,
        which may have added channels.
    arrays
        Learned params and constants with their head axis, in the working dtype; without those of
        keys, which only the transform reads.
    query, key
        Positions, segments, places and features of the queries and of the keys.
    aligned
        Whether positions are the default: in order, with the ends of q and k aligned.
    in_the_past
        Whether it is known from given positions that no key is after a query. Then a causal mask
        hides nothing.
    causal, window, sink_tokens
        As in ``attention``; the window is ``(left, right)`` or None.
    scale, softcap
        Factor of the scores, and their cap or None.
    extra_bias
        The caller's bias, ``(B or 1, H or 1, Q, K)``, or None.
    mask
        The caller's mask: booleans ``(B or 1, H or 1, Q, K)``, a function of positions and
        segments, or None.
    sink
        A logit in each query's softmax denominator, ``(B or 1, H or 1, Q or 1)``, or None.
    wants_lse
        Whether the caller asks for the log-sum-exp.
    skip_blocks
        Whether an implementation may skip ``negligible_blocks``.
    regions
        One call for each of the scheme's ``regions``; empty if it has none.
    """

    scheme: PositionScheme
    xp: Namespace
    dtype: Any
    q: Array
    k: Array
    v: Array
    arrays: Mapping[str, Array]
    query: Side
    key: Side
    aligned: bool
    causal: bool
    window: Window | None
    sink_tokens: int
    scale: float
    softcap: float | None = None
    extra_bias: Array | None = None
    mask: Array | Mask | None = None
    sink: Array | None = None
    in_the_past: bool = False
    wants_lse: bool = False
    skip_blocks: bool = True
    regions: tuple[Call, ...] = ()

    @property
    def in_order(self) -> bool:
        """Whether positions are the default, and no places replace them in the scheme."""
        return self.aligned and self.query.places is None

    @property
    def plain(self) -> bool:
        """Whether the caller gives no bias, no mask and no cap of scores."""
        return self.extra_bias is None and self.mask is None and self.softcap is None

    @property
    def needs_lse(self) -> bool:
        """Whether the caller asks for the log-sum-exp, or a sink needs it."""
        return self.wants_lse or self.sink is not None

    def views(self, *, rows: bool = False) -> Params:
        """The ``params`` of ``scheme.bias`` for all pairs; with ``rows``, of ``adjust_scores``."""
        return head_views(
            self.scheme, self.arrays, dtype=self.dtype, xp=self.xp, rows=rows,
            query=self._tile_views(self.query, "query", rows),
            key=self._tile_views(self.key, "key", rows),
        )  # fmt: skip

    def _tile_views(self, side: Side, role: Role, rows: bool) -> Features:
        """The features of a side; with ``rows``, its segments too, if it has any."""
        own = side.features
        if rows and side.seg is not None:
            seg = side.seg if len(side.seg.shape) == 2 else side.seg[None, :]
            own = {**own, _SEGMENT: seg[:, None, :]}
        return tile_views(own, role, xp=self.xp, rows=rows)

    def bias_terms(self) -> tuple[Call, ...]:
        """One call for each scheme of ``scheme.bias_terms()``: their biases add up to the bias."""
        return tuple(
            self if scheme is self.scheme else self._with_part(prefix, scheme)
            for prefix, scheme in self.scheme.bias_terms()
        )

    def _with_part(self, prefix: str, scheme: PositionScheme) -> Call:
        """The same call with a part of the scheme, whose arrays and features have a prefix."""
        names, absent = (*scheme.param_specs(), *scheme.constants()), of_keys(scheme)
        query, key = (
            side._replace(features=_without_prefix(side.features, prefix))
            for side in (self.query, self.key)
        )
        arrays = {name: self.arrays[prefix + name] for name in names if name not in absent}
        return replace(self, scheme=scheme, arrays=arrays, query=query, key=key)

    def bias(self, read: ReadTable | None = None) -> Array | None:
        """The dense bias, ``(B or 1, H or 1, Q, K)``, in the working dtype; None without one.

        It includes the caller's bias. ``read`` reads tables of tokens.
        """
        bias = dense_bias(
            self.scheme,
            as_column(self.query.encoded_pos),
            as_row(self.key.encoded_pos),
            self.arrays,
            query=self.query.features,
            key=self.key.features,
            dtype=self.dtype,
            xp=self.xp,
            read=read,
            in_order=self.in_order,
        )
        if bias is None or self.extra_bias is None:
            return self.extra_bias if bias is None else bias
        return bias + self.extra_bias

    def visible(self) -> Array | None:
        """Visible pairs, booleans ``(B or 1, H or 1, Q, K)``; None if all pairs are visible."""
        causal_only = self.window is None and self.query.seg is None and self.mask is None
        if causal_only and self.in_the_past:
            return None
        return visible_pairs(self, self.query, self.key, self.mask)

    def bias_and_visible(self, read: ReadTable | None = None) -> tuple[Array | None, Array | None]:
        """The dense bias and the visible pairs; a bias of ``-inf`` becomes 0 and "not visible"."""
        bias, mask = self.bias(read), self.visible()
        return (None, mask) if bias is None else self.split_bias(bias, mask)

    def split_bias(self, bias: Array, mask: Array | None) -> tuple[Array, Array]:
        """The bias with 0 for ``-inf``, and ``mask`` without the pairs that it hides."""
        finite = bias != -math.inf
        mask = finite if mask is None else mask & finite
        return self.xp.where(finite, bias, 0.0), mask

    def cap_scores(self, scores: Array) -> Array:
        """``softcap * tanh(scores / softcap)``; the scores without a cap."""
        if self.softcap is None:
            return scores
        return self.softcap * self.xp.tanh(scores / self.softcap)


def visible_pairs(call: Call, query: Side, key: Side, mask: Array | Mask | None) -> Array | None:
    """Visible pairs of some queries and keys of a call, ``(B or 1, H or 1, Q, K)``; None for all.

    ``mask`` is the caller's mask. If it is an array, it holds these queries and keys only.
    """
    at = as_column(query.pos), as_row(key.pos)
    segments: tuple[Array | None, Array | None] = None, None
    if query.seg is not None and key.seg is not None:
        segments = as_column(query.seg), as_row(key.seg)
    pairs = visible(
        *at, *segments, causal=call.causal, window=call.window, sink_tokens=call.sink_tokens
    )
    if mask is None:
        return pairs
    allowed = mask(*at, *segments) if isinstance(mask, Mask) else mask
    return allowed if pairs is None else pairs & allowed


def prepare(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    causal: bool = False,
    *,
    skip_blocks: bool = True,
    xp: Namespace | None = None,
    **options: Unpack[Options],
) -> Call:
    """Check the arguments of ``attention``, fill in defaults, and transform queries and keys."""
    xp = xp or namespace(q=q, k=k, v=v)
    check_scheme(scheme)
    check_shapes(q, k, v, xp=xp)
    check_heads(scheme, q)
    given = Arguments(**options)
    if not check_flag("k_transformed", given.k_transformed):
        check_head_dims(q, k)
    work = working_dtype([q, k, v, *float_arrays(options), *as_mapping(params).values()], xp=xp)
    scheme, params = _scheme_in_attention(scheme, params, xp=xp)
    query, key, aligned, in_the_past = complete_sides(q, k, given, scheme, xp)
    q, k = zero_padding(q, k, query, key, scheme, xp)
    mask = as_mask(given.mask, q, k, xp)
    if isinstance(mask, Mask):
        check_mask_result(mask, query, key, xp)
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
        in_the_past=in_the_past,
        causal=check_flag("causal", causal),
        window=check_window(given.window),
        # Positions are below 2**30, and a larger number may not fit 32 bits.
        sink_tokens=min(check_count("sink_tokens", given.sink_tokens, least=0), 2**30),
        scale=check_scale(scheme.scale(q.shape[3]) if given.scale is None else given.scale, bits),
        softcap=None if given.softcap is None else check_softcap(given.softcap, bits),
        extra_bias=as_pairs("bias", given.bias, q, k, work, xp),
        mask=mask,
        wants_lse=check_flag("return_lse", given.return_lse),
        skip_blocks=check_flag("skip_blocks", skip_blocks),
    )
    _check_bias(call)
    if (advice := scheme.caution(causal=call.causal)) is not None:
        _warn(scheme, advice, xp)
    if has_features(scheme):
        call = _with_features(call, given)
    elif given.q_features is not None or given.k_features is not None:
        name = "k_features" if given.q_features is None else "q_features"
        raise ValueError(f"{type(scheme).__name__} has no features of tokens: leave out {name}")
    hooks = scheme.hooks()
    if "sink" in hooks:
        sink = scheme.sink(as_column(call.query.encoded_pos), params=call.views(), xp=xp)
        call = replace(call, sink=None if sink is None else _squeeze_sink(sink, work, xp))
    if "regions" in hooks:
        _check_rotary(scheme, given)
        return _with_regions(call, params, causal, skip_blocks, options, given)
    return _with_transform(call, params, given)


def _check_bias(call: Call) -> None:
    """Check that no visible pair has a bias of ``inf``, where values are known on the host."""
    bias, xp = call.extra_bias, call.xp
    if bias is None or "cpu" not in str(device(bias)).lower():
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


def _without_prefix(features: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The features whose names have a prefix, by their names without it, and places."""
    own = {n.removeprefix(prefix): a for n, a in features.items() if n.startswith(prefix)}
    return own | {n: a for n, a in features.items() if n == _PLACES}


def _squeeze_sink(sink: Array, dtype: Any, xp: Namespace) -> Array:
    """A sink ``(B or 1, H or 1, Q or 1)``, from an array that broadcasts to ``(B, H, Q, 1)``."""
    missing = (1,) * (4 - len(sink.shape))
    return xp.astype(xp.reshape(sink, (*missing, *sink.shape))[..., 0], dtype, copy=False)


def _with_features(call: Call, given: Arguments) -> Call:
    """The call with the features of queries and keys, computed unless the caller gives them."""
    query, key = side_features(
        call.scheme,
        Params(call.arrays, call.dtype),
        (call.q, call.k),
        (call.query, call.key),
        given=(given.q_features, given.k_features),
        x=given.x,
        q_x=given.q_x,
        aligned=call.aligned,
        k_transformed=given.k_transformed,
        scale=call.scale,
        xp=call.xp,
    )
    return replace(
        call,
        query=call.query._replace(features=query),
        key=call.key._replace(features=key),
    )


def _with_transform(call: Call, params: Mapping[str, Array] | None, given: Arguments) -> Call:
    """The call with transformed queries and keys, and sides that hold what the bias reads."""
    scheme, xp = call.scheme, call.xp
    q, k, query, key = call.q, call.k, call.query, call.key
    if has_transform(scheme):
        q_rotary, k_rotary = given.q_rotary, given.k_rotary
        if q_rotary is None and k_rotary is None and _share_rotary(call, given):
            q_rotary = k_rotary = rotary(scheme, key.pos, params, dtype=q.dtype, xp=xp)
        q = _transform_side(scheme, q, query, "query", params, q_rotary, xp)
        if not given.k_transformed:
            k = _transform_side(scheme, k, key, "key", params, k_rotary, xp)
        elif given.k_rotary is not None:
            raise ValueError("k_rotary is given with k_transformed=True: leave out k_rotary")
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


def _share_rotary(call: Call, given: Arguments) -> bool:
    """Whether queries and keys have the same positions, and arrays of heads do not differ."""
    scheme, q, k = call.scheme, call.q, call.k
    if not call.aligned or given.q_axes is not None or given.k_transformed:
        return False
    of_heads = scheme.param_specs() or scheme.constants()
    if "rotary" not in scheme.hooks() or of_heads or q.dtype != k.dtype:
        return False
    # Last, because an exported program keeps every condition on lengths that it evaluates.
    return bool(q.shape[2] == k.shape[2])


def _transform_side(
    scheme: PositionScheme,
    x: Array,
    side: Side,
    role: Role,
    params: Mapping[str, Array] | None,
    rotary: Rotary | None,
    xp: Namespace,
) -> Array:
    return transform_at(
        scheme,
        x,
        side.encoded_pos,
        role=role,
        params=params,
        features=side.features,
        rotary=rotary,
        xp=xp,
    )


def _check_rotary(scheme: PositionScheme, given: Arguments) -> None:
    """Check what the caller gives to a scheme that does not transform, or has regions that do."""
    if given.q_rotary is not None:
        check_rotary(given.q_rotary, scheme, "query")
    if given.k_rotary is not None:
        check_rotary(given.k_rotary, scheme, "key")


def _side_for_bias(scheme: PositionScheme, side: Side) -> Side:
    """The side with the features that the bias reads, and places on several axes as a feature."""
    read = scheme.reads_features() or "adjust_scores" in scheme.hooks()
    features = side.features if read else {}
    if scheme.axes == 1:
        return side._replace(features=features)
    if side.places is not None and features is side.features and has_bias(scheme):
        places = side.places[None, ...] if len(side.places.shape) == 2 else side.places
        features = {**features, _PLACES: places[:, None, :, :]}
    return side._replace(places=None, features=features)


def _with_regions(
    call: Call,
    params: Mapping[str, Array] | None,
    causal: bool,
    skip_blocks: bool,
    options: Options,
    given: Arguments,
) -> Call:
    """The call with one call for each region of distances."""
    if given.k_transformed:
        raise ValueError(
            f"k_transformed=True: {type(call.scheme).__name__} transforms keys in several ways; "
            "cache raw keys"
        )
    parts: list[Call] = []
    regions = call.scheme.regions()
    _check_no_overlap(type(call.scheme).__name__, regions)
    _check_sinks(call.scheme, regions)
    of_all = given.scale is not None or "scale" in call.scheme.hooks()
    numbered = list(enumerate(regions))
    if causal:  # keys after the query, at distances below 0, are not visible
        before = [(n, r) for n, r in numbered if r[1][0] is None or r[1][0] >= 0]
        numbered = before or numbered
    for n, (part, window) in numbered:
        part_params = {
            name: array for name, array in as_mapping(params).items() if name in part.param_specs()
        }
        part_options: Options = {
            **options, "window": None, "sink_tokens": 0, "return_lse": False,
            "scale": call.scale if of_all else None,
        }  # fmt: skip
        part_options["q_rotary"] = given.q_rotary and given.q_rotary.regions[n]
        part_options["k_rotary"] = given.k_rotary and given.k_rotary.regions[n]
        if not has_features(part):  # given features may belong to a Sink around the regions
            part_options |= {"q_features": None, "k_features": None}
        part_call = prepare(
            call.q, call.k, call.v, part, part_params, causal,
            skip_blocks=skip_blocks, xp=call.xp, **part_options,
        )  # fmt: skip
        for inner in part_call.regions or (part_call,):
            inner_window = _intersect(inner.window, window)
            if not _is_empty(inner_window):
                # Regions are merged by their log-sum-exp.
                parts.append(replace(_restrict(call, inner, inner_window), wants_lse=True))
    return replace(call, regions=tuple(parts))


def _check_sinks(
    scheme: PositionScheme, regions: tuple[tuple[PositionScheme, Window], ...]
) -> None:
    """Check that no region has a sink of its own: a row has one denominator."""
    for part, window in regions:
        if "sink" in part.hooks() and "sink" not in scheme.hooks():
            name = type(scheme).__name__
            raise ValueError(
                f"{name}: the scheme of a region must have no sink, got {type(part).__name__} in "
                f"the region {window}; put the sink around the whole: Sink({name}(...))"
            )


def _check_no_overlap(name: str, regions: tuple[tuple[PositionScheme, Window], ...]) -> None:
    """Check that no distance is in two regions, where its keys would count twice.

    Where a region has a bias, which may mask keys that another region has, a law checks it.
    """
    ends = []
    for _, window in regions:
        if not isinstance(window, tuple) or len(window) != 2:
            raise ValueError(f"{name}: the window of a region must be (left, right), got {window}")
        left, right = window
        ends.append((-math.inf if right is None else -right, math.inf if left is None else left))
    for n, (low, high) in enumerate(ends):
        for other, (low_too, high_too) in enumerate(ends[:n]):
            masks = has_bias(regions[n][0]) or has_bias(regions[other][0])
            if max(low, low_too) <= min(high, high_too) and not masks:
                both = f"{regions[other][1]} and {regions[n][1]}"
                raise ValueError(f"{name}: windows of regions must not overlap, got {both}")


def _restrict(call: Call, part: Call, window: Window) -> Call:
    """The call of a region with its ``window``, restricted to the caller's window."""
    if call.window is None or not call.sink_tokens:
        return replace(part, window=_intersect(call.window, window))
    # sink_tokens extend the caller's window, but not the region's: each pair is in one region only.
    mask = call.mask
    if mask is None or isinstance(mask, Mask):
        first = FirstTokens(call.window, call.sink_tokens, mask)
        with_segments = mask is not None and mask.with_segments
        return replace(part, window=window, mask=Mask(first, with_segments))
    at = as_column(call.query.pos), as_row(call.key.pos)
    pairs = visible(*at, window=call.window, sink_tokens=call.sink_tokens)
    return replace(part, window=window, mask=mask if pairs is None else mask & pairs)


def _is_empty(window: Window) -> bool:
    """Whether no distance is in a window."""
    left, right = window
    return left is not None and right is not None and left + right < 0


def _intersect(outer: Window | None, inner: Window) -> Window:
    """The intersection of two windows."""
    if outer is None:
        return inner
    left, right = (
        a if b is None else b if a is None else min(a, b) for a, b in zip(outer, inner, strict=True)
    )
    return left, right


_CACHE_WITHOUT_POSITIONS = (
    "k_transformed=True without q_pos and k_pos assumes that k holds all keys from position 0 on; "
    "if the cache dropped its first keys, give the positions"
)

_PLACES = "places"  # features that every part of a scheme reads
_SEGMENT = "segment"

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
