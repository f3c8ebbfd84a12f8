"""A call of attention, checked and completed: where every implementation begins."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Unpack

from array_api_compat import device

from posenc.attn.arguments import (
    Arguments,
    as_pairs,
    check_heads,
    check_shapes,
    complete_sides,
    namespace,
)
from posenc.attn.features import side_features
from posenc.attn.masks import FirstTokens, Mask, as_mask, check_mask_result
from posenc.attn.options import Options, float_arrays
from posenc.attn.side import Side
from posenc.checks import (
    check_count,
    check_finite,
    check_flag,
    check_positive,
    check_scheme,
    check_window,
)
from posenc.evaluate import (
    as_column,
    as_row,
    attention_part,
    bias_tile,
    embeds_only,
    has_bias,
    has_features,
    has_transform,
    transform,
)
from posenc.params import (
    Params,
    as_mapping,
    check_params,
    head_views,
    merge_constants,
    tile_views,
    working_dtype,
)
from posenc.positions import visible
from posenc.protocol import Array, Namespace, PositionScheme, Role, SchemeWarning, Window


@dataclass(frozen=True)
class Call:
    """One call of attention, checked and completed: what every implementation computes from.

    Attributes
    ----------
    scheme, xp, dtype
        The scheme, the array namespace, and the working float.
    q, k, v
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``; q and k already transformed.
    arrays
        Learned params and constants, whole, in the working float.
    query, key
        Positions, segments, places and features of each side; ``aligned`` if positions are the
        default.
    causal, window, sink_tokens
        As asked for; a window is ``(left, right)``, or None.
    scale, softcap
        Completed; None for no cap.
    extra_bias
        The caller's own bias, ``(B or 1, H or 1, Q, K)``, or None.
    mask
        The caller's own mask: booleans likewise, or a function of positions and segments, or None.
    sink
        A logit of no key in each query's denominator, ``(B or 1, H or 1, Q or 1)``, or None.
    wants_lse
        Whether a log-sum-exp is asked for.
    skip_blocks
        Whether an implementation may leave out what ``posenc.attn.negligible`` proves to round to
        nothing.
    regions
        Calls of the parts that serve different distances; empty where this call serves all.
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
    wants_lse: bool = False
    skip_blocks: bool = True
    regions: tuple[Call, ...] = ()

    @property
    def in_order(self) -> bool:
        """Whether positions are the default and stand for places too."""
        return self.aligned and self.query.places is None

    @property
    def plain(self) -> bool:
        """Whether the caller brings no bias, no mask and no cap of scores."""
        return self.extra_bias is None and self.mask is None and self.softcap is None

    @property
    def needs_lse(self) -> bool:
        """Whether a log-sum-exp is asked for, or a sink is put in by it."""
        return self.wants_lse or self.sink is not None

    def views(self) -> Params:
        """Params and features as ``bias`` reads them on the whole of the scores."""
        return head_views(
            self.scheme, self.arrays, dtype=self.dtype, xp=self.xp,
            query=tile_views(self.query.features, "query", xp=self.xp),
            key=tile_views(self.key.features, "key", xp=self.xp),
        )  # fmt: skip

    def bias(self) -> Array | None:
        """The whole bias, ``(B or 1, H or 1, Q, K)``, in the working float; None without one."""
        own = bias_tile(
            self.scheme,
            as_column(self.query.encoded_pos),
            as_row(self.key.encoded_pos),
            self.arrays,
            query=self.query.features,
            key=self.key.features,
            dtype=self.dtype,
            xp=self.xp,
        )
        if own is None or self.extra_bias is None:
            return self.extra_bias if own is None else own
        return own + self.extra_bias

    def visible(self) -> Array | None:
        """Which query sees which key, booleans ``(B or 1, H or 1, Q, K)``; None: each sees all."""
        return visible_pairs(self, self.query, self.key, self.mask)

    def bias_and_visible(self) -> tuple[Array | None, Array | None]:
        """Bias and visibility, with a bias of ``-inf`` turned into "not visible" and 0."""
        bias, seen = self.bias(), self.visible()
        if bias is None:
            return None, seen
        finite = bias != -math.inf
        seen = finite if seen is None else seen & finite
        return self.xp.where(finite, bias, 0.0), seen

    def cap_scores(self, scores: Array) -> Array:
        """``softcap * tanh(scores / softcap)``, or the scores."""
        if self.softcap is None:
            return scores
        return self.softcap * self.xp.tanh(scores / self.softcap)


def visible_pairs(call: Call, query: Side, key: Side, mask: Array | Mask | None) -> Array | None:
    """Which of some queries see which of some keys, ``(B or 1, H or 1, Q, K)``; None: all see all.

    ``mask`` is the caller's, for these queries and keys if it is an array.
    """
    at = as_column(query.pos), as_row(key.pos)
    segments: tuple[Array | None, Array | None] = None, None
    if query.seg is not None and key.seg is not None:
        segments = as_column(query.seg), as_row(key.seg)
    seen = visible(
        *at, *segments, causal=call.causal, window=call.window, sink_tokens=call.sink_tokens
    )
    if mask is None:
        return seen
    own = mask(*at, *segments) if isinstance(mask, Mask) else mask
    return own if seen is None else seen & own


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
    """The arguments of ``attention``, checked and completed: where every implementation begins."""
    xp = xp or namespace(q=q, k=k, v=v)
    check_scheme(scheme)
    check_shapes(q, k, v, xp=xp)
    check_heads(scheme, q)
    given = Arguments(options)
    work = working_dtype([q, k, v, *float_arrays(options), *as_mapping(params).values()], xp=xp)
    scheme, params = _in_attention(scheme, params, xp=xp)
    aligned, query, key = complete_sides(q, k, given, scheme, xp)
    mask = as_mask(given.mask, q, k, xp)
    if isinstance(mask, Mask):
        check_mask_result(mask, query, key, xp)
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
        causal=check_flag("causal", causal),
        window=check_window(given.window),
        # No position is 2**30, and to compare with 2**31 takes more than 32 bits.
        sink_tokens=min(check_count("sink_tokens", given.sink_tokens, least=0), 2**30),
        scale=check_finite(
            "scale", scheme.scale(q.shape[3]) if given.scale is None else given.scale
        ),
        softcap=None if given.softcap is None else check_positive("softcap", given.softcap),
        extra_bias=as_pairs("bias", given.bias, q, k, work, xp),
        mask=mask,
        wants_lse=check_flag("return_lse", given.return_lse),
        skip_blocks=check_flag("skip_blocks", skip_blocks),
    )
    if (advice := scheme.caution(causal=call.causal)) is not None:
        _warn(scheme, advice, xp)
    if has_features(scheme):
        call = _with_features(call, given)
    elif given.q_features is not None or given.k_features is not None:
        name = "k_features" if given.q_features is None else "q_features"
        raise ValueError(f"{type(scheme).__name__} has no features of tokens: leave out {name}")
    if "sink" in scheme.hooks():
        found = scheme.sink(as_column(call.query.encoded_pos), params=call.views(), xp=xp)
        call = replace(call, sink=None if found is None else _of_queries(found, work, xp))
    if "regions" in scheme.hooks():
        return _in_regions(call, params, causal, skip_blocks, options)
    return _transformed(call, params, given.k_transformed)


def _of_queries(sink: Array, dtype: Any, xp: Namespace) -> Array:
    """A sink ``(B or 1, H or 1, Q or 1)``, from what broadcasts to ``(B, H, Q, 1)``."""
    missing = (1,) * (4 - len(sink.shape))
    return xp.astype(xp.reshape(sink, (*missing, *sink.shape))[..., 0], dtype, copy=False)


def _with_features(call: Call, given: Arguments) -> Call:
    """The call with features of both sides, computed or as given."""
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


def _transformed(call: Call, params: Mapping[str, Array] | None, k_transformed: bool) -> Call:
    """The call with queries and keys as seen from their places, and what a bias reads of them."""
    scheme, xp = call.scheme, call.xp
    q, k, query, key = call.q, call.k, call.query, call.key
    if has_transform(scheme):
        q = _seen_from(scheme, q, query, "query", params, xp)
        if not k_transformed:
            k = _seen_from(scheme, k, key, "key", params, xp)
        elif call.aligned:
            _warn(scheme, _CACHE, xp)
    return replace(call, q=q, k=k, query=_for_bias(scheme, query), key=_for_bias(scheme, key))


def _seen_from(
    scheme: PositionScheme,
    x: Array,
    side: Side,
    role: Role,
    params: Mapping[str, Array] | None,
    xp: Namespace,
) -> Array:
    return transform(
        scheme,
        x,
        side.pos,
        role=role,
        params=params,
        axes=side.places,
        features=side.features,
        xp=xp,
    )


def _for_bias(scheme: PositionScheme, side: Side) -> Side:
    """What a bias reads of a side: its places as a feature where there are several axes."""
    read = scheme.reads_features() or "adjust_scores" in scheme.hooks()
    features = side.features if read else {}
    if scheme.axes == 1:
        return side._replace(features=features)
    if side.places is not None and features is side.features and has_bias(scheme):
        places = side.places[None, ...] if len(side.places.shape) == 2 else side.places
        features = {**features, "places": places[:, None, :, :]}
    return side._replace(places=None, features=features)


def _in_regions(
    call: Call,
    params: Mapping[str, Array] | None,
    causal: bool,
    skip_blocks: bool,
    options: Options,
) -> Call:
    """The call, with one for each region of distances."""
    if options.get("k_transformed", False):
        raise ValueError(
            f"k_transformed=True: {type(call.scheme).__name__} transforms keys in several ways; "
            "cache them as they are"
        )
    parts, regions = [], call.scheme.regions()
    _check_apart(type(call.scheme).__name__, regions)
    for part, window in regions:
        own = {
            name: array for name, array in as_mapping(params).items() if name in part.param_specs()
        }
        inner: Options = {
            **options, "window": None, "sink_tokens": 0, "return_lse": False, "scale": call.scale
        }  # fmt: skip
        if not has_features(part):  # those of a sink around this one are not its own
            inner |= {"q_features": None, "k_features": None}
        made = prepare(
            call.q, call.k, call.v, part, own, causal, skip_blocks=skip_blocks, xp=call.xp, **inner
        )
        # Merged by their log-sum-exp.
        parts.append(replace(_within(call, made, window), wants_lse=True))
    return replace(call, regions=tuple(parts))


def _check_apart(name: str, regions: tuple[tuple[PositionScheme, Window], ...]) -> None:
    """No distance is in two regions: its keys would be counted twice."""
    ends = []
    for _, window in regions:
        if not isinstance(window, tuple) or len(window) != 2:
            raise ValueError(f"{name}: the window of a region must be (left, right), got {window}")
        left, right = window
        ends.append((-math.inf if right is None else -right, math.inf if left is None else left))
    for n, (low, high) in enumerate(ends):
        for other, (low_too, high_too) in enumerate(ends[:n]):
            if max(low, low_too) <= min(high, high_too):
                both = f"{regions[other][1]} and {regions[n][1]}"
                raise ValueError(f"{name}: windows of regions must not overlap, got {both}")


def _within(call: Call, part: Call, window: Window) -> Call:
    """A part of a call that serves a window, inside of the window and first tokens of the call."""
    if call.window is None or not call.sink_tokens:
        return replace(part, window=_narrowed(call.window, window))
    # First tokens are inside of the caller's window, not of a region's: one region has each pair.
    mask = call.mask
    if mask is None or isinstance(mask, Mask):
        own = FirstTokens(call.window, call.sink_tokens, mask)
        return replace(part, window=window, mask=Mask(own, mask is not None and mask.with_segments))
    at = as_column(call.query.pos), as_row(call.key.pos)
    seen = visible(*at, window=call.window, sink_tokens=call.sink_tokens)
    return replace(part, window=window, mask=mask if seen is None else mask & seen)


def _narrowed(outer: Window | None, inner: Window) -> Window:
    """What is inside of both windows."""
    if outer is None:
        return inner
    left, right = (
        a if b is None else b if a is None else min(a, b) for a, b in zip(outer, inner, strict=True)
    )
    return left, right


_CACHE = (
    "k_transformed=True without q_pos and k_pos takes k for all keys from position 0 on; give the "
    "positions, or a cache that dropped its first keys is wrong"
)


_EMBEDS = (
    "it acts on token embeddings alone, so attention adds nothing; give it tokens to which "
    "posenc.embedding(scheme, pos) was added, and posenc.NoPE() here"
)


def _in_attention(
    scheme: PositionScheme, params: Mapping[str, Array] | None, *, xp: Namespace
) -> tuple[PositionScheme, Mapping[str, Array] | None]:
    """What attention needs of a scheme; that of an embedding is nothing, which is said."""
    if not embeds_only(scheme):
        return scheme, params
    if as_mapping(params):
        check_params(scheme, params, xp=xp)
    _warn(scheme, _EMBEDS, xp)
    return attention_part(scheme, params)


def _warn(scheme: PositionScheme, advice: str, xp: Namespace) -> None:
    """A ``SchemeWarning`` at the line of the caller; none while PyTorch compiles, which cannot."""
    compiler = getattr(xp, "compiler", None)
    if compiler is not None and compiler.is_compiling():
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    message = f"attention with {type(scheme).__name__}: {advice}"
    warnings.warn(message, SchemeWarning, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0].startswith("posenc")
