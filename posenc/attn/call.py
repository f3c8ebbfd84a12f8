"""``Call``: the checked and completed arguments from which every implementation computes."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np
from array_api_compat import device

from posenc.angles.rotary import check_rotary
from posenc.apply.evaluate import (
    as_column,
    as_row,
    dense_bias,
    has_bias,
    has_transform,
    rotary,
    transformation,
)
from posenc.apply.feature_needs import has_features, reads_features
from posenc.attn.arguments import (
    Arguments,
    as_pairs,
    check_head_dims,
    check_heads,
    check_shapes,
    complete_sides,
    namespace,
)
from posenc.attn.embedding_only import attention_part, embeds_only
from posenc.attn.features import side_features
from posenc.attn.masks import Mask, as_columns, as_rows, check_parts, complete_mask
from posenc.attn.padding import zero_padding
from posenc.attn.regions import with_regions
from posenc.attn.shared import Shared, nothing_kept
from posenc.contract.checks import (
    check_flag,
    check_scale,
    check_scheme,
    check_softcap,
)
from posenc.contract.operations import is_compiling
from posenc.contract.params import (
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
from posenc.contract.protocol import (
    Array,
    Hook,
    Namespace,
    PositionScheme,
    Role,
    SchemeWarning,
    Window,
)
from posenc.contract.tokens import Rotary, Tokens
from posenc.positions.integers import concrete_values

T = TypeVar("T")
_NOTHING = Arguments()


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
    mask
        Which keys a query sees, beside segments: ``causal=``, ``window=`` and ``mask=`` in one, in
        normal form (``posenc.attn.masks.normal``).
    scale, softcap
        Factor of the scores, and their cap or None.
    extra_bias
        The caller's bias, ``(B or 1, H or 1, Q, K)``, or None.
    sink
        A logit in each query's softmax denominator, ``(B or 1, H or 1, Q or 1)``, or None.
    wants_lse
        Whether the caller asks for the log-sum-exp.
    skip_blocks
        Whether an implementation may skip ``negligible_blocks``.
    regions
        One call for each of the scheme's ``regions``; empty if it has none.
    shared
        What other layers of a forward pass have made already; None outside of a pass.
    """

    scheme: PositionScheme
    xp: Namespace
    dtype: Any
    q: Array
    k: Array
    v: Array
    arrays: Mapping[str, Array]
    query: Tokens
    key: Tokens
    aligned: bool
    mask: Mask
    scale: float
    softcap: float | None = None
    extra_bias: Array | None = None
    sink: Array | None = None
    in_the_past: bool = False
    wants_lse: bool = False
    skip_blocks: bool = True
    regions: tuple[Call, ...] = ()
    shared: Shared | None = None

    @property
    def causal(self) -> bool:
        """Whether the mask is causal, or something and causal."""
        return self.mask.causal

    @property
    def window(self) -> Window | None:
        """The window ``(left, right)``, or None."""
        return self.mask.window

    @property
    def in_order(self) -> bool:
        """Whether positions are the default, and no places replace them in the scheme."""
        return self.aligned and self.query.places is None

    @property
    def plain(self) -> bool:
        """Whether the caller gives no bias, no mask and no cap of scores."""
        return self.extra_bias is None and self.mask.plain and self.softcap is None

    @property
    def needs_lse(self) -> bool:
        """Whether the caller asks for the log-sum-exp, or a sink needs it."""
        return self.wants_lse or self.sink is not None

    def once(self, name: str, make: Callable[[], T]) -> T:
        """``make()``, or in a pass what a layer with an equal call made; not of vectors."""
        return make() if self.shared is None else self.shared.once(self, name, make)

    def views(self, *, rows: bool = False) -> Params:
        """The ``params`` of ``scheme.bias`` for all pairs; with ``rows``, of ``adjust_scores``."""
        return head_views(
            self.scheme, self.arrays, dtype=self.dtype, xp=self.xp, rows=rows,
            query=self._tile_views(self.query, "query", rows),
            key=self._tile_views(self.key, "key", rows),
        )  # fmt: skip

    def _tile_views(self, side: Tokens, role: Role, rows: bool) -> Features:
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
            side.with_features(_without_prefix(side.features, prefix))
            for side in (self.query, self.key)
        )
        arrays = {name: self.arrays[prefix + name] for name in names if name not in absent}
        return replace(self, scheme=scheme, arrays=arrays, query=query, key=key)

    def bias(self, read: ReadTable | None = None) -> Array | None:
        """The dense bias, ``(B or 1, H or 1, Q, K)``, in the working dtype; None without one.

        It includes the caller's bias. ``read`` reads tables of tokens.
        """
        bias = self.once("bias", lambda: self._scheme_bias(read))
        if bias is None or self.extra_bias is None:
            return self.extra_bias if bias is None else bias
        return bias + self.extra_bias

    def _scheme_bias(self, read: ReadTable | None) -> Array | None:
        return dense_bias(
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

    def visible(self) -> Array | None:
        """Visible pairs, booleans ``(B or 1, H or 1, Q, K)``; None if all pairs are visible."""
        causal_only = self.window is None and self.query.seg is None and self.mask.plain
        if causal_only and self.in_the_past:
            return None
        if self.shared is None:
            return self._visible()
        return self.shared.once_of_tokens(self, "visible", self._visible)

    def _visible(self) -> Array | None:
        return visible_pairs(self.mask, self.query, self.key, self.xp)

    def bias_and_visible(self, read: ReadTable | None = None) -> tuple[Array | None, Array | None]:
        """The dense bias and the visible pairs; a bias of ``-inf`` becomes 0 and "not visible"."""

        def both() -> tuple[Array | None, Array | None]:
            bias, mask = self.bias(read), self.visible()
            return (None, mask) if bias is None else self.split_bias(bias, mask)

        return self.once("bias and visible", both)

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


def visible_pairs(mask: Mask, query: Tokens, key: Tokens, xp: Namespace) -> Array | None:
    """Visible pairs of some queries and keys, ``(B or 1, H or 1, Q, K)``; None for all.

    If the mask has booleans, they are of these queries and keys only.
    """
    return visible_tokens(mask, as_columns(query), as_rows(key), xp)


def visible_tokens(mask: Mask, q: Tokens, k: Tokens, xp: Namespace) -> Array | None:
    """Whether a key is visible to a query, from positions and segments that broadcast."""
    pairs = mask.pairs(q, k, xp)
    if q.seg is None or k.seg is None:
        return pairs
    same: Array = q.seg == k.seg
    return same if pairs is None else pairs & same


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
    xp: Namespace | None = None,
) -> Call:
    """Check the arguments of ``attention``, fill in defaults, and transform queries and keys."""
    xp = xp or namespace(q=q, k=k, v=v)
    check_scheme(scheme)
    check_shapes(q, k, v, xp=xp)
    check_heads(scheme, q)
    given = given.check()
    if not check_flag("k_transformed", given.k_transformed):
        check_head_dims(q, k)
    work = working_dtype([q, k, v, *given.floats(), *as_mapping(params).values()], xp=xp)
    scheme, params = _scheme_in_attention(scheme, params, xp=xp)
    once = nothing_kept if shared is None else shared.made.once
    query, key, aligned, in_the_past = once(
        "sides", lambda: complete_sides(q, k, given, scheme, xp)
    )
    mask = once("mask", lambda: _mask(q, k, causal, given, query, key, xp))
    q, k = zero_padding(q, k, query, key, scheme, xp)
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
        return with_regions(call, params, given, prepare)
    return _with_transform(call, params, given)


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
    if x is not None and given.queries is None and hasattr(x, "shape") and len(x.shape) == 3:
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
            ("rotary", shared.rotary_key, role, str(dtype)),
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
    read = reads_features(scheme) or Hook.ADJUST_SCORES in scheme.hooks()
    features = side.features if read else {}
    if scheme.axes == 1:
        return side.with_features(features)
    if side.places is not None and features is side.features and has_bias(scheme):
        places = side.places[None, ...] if len(side.places.shape) == 2 else side.places
        features = {**features, _PLACES: places[:, None, :, :]}
    return Tokens(side.pos, side.seg, features=features)


_CACHE_WITHOUT_POSITIONS = (
    "k_transformed=True without tokens.pos assumes that k holds all keys from position 0 on; "
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
