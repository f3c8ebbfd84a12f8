"""``Call``: the checked and completed arguments from which every implementation computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from posenc.apply.bias import dense_bias
from posenc.apply.shapes import as_column, as_row
from posenc.attn.channel_decay import ChannelDecay
from posenc.attn.masks import Mask, as_columns, as_rows
from posenc.attn.shared import Shared
from posenc.contract.params import (
    SEGMENT,
    Features,
    Params,
    head_views,
    of_keys,
    tile_views,
    without_prefix,
)
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Namespace, Role, Window
from posenc.contract.tables import ReadTable
from posenc.contract.tokens import Tokens

T = TypeVar("T")


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
    keys_in_order
        Whether keys have default positions, or some of them, and no places: each is at a later
        position than the key before it in memory.
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
    keys_in_order: bool = False
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
    def offsets(self) -> Window:
        """``(left, right)``: the mask hides keys further before or after a query's own place.

        None for no bound; always if positions are not the default.
        """
        return self.mask.offsets() if self.in_order else (None, None)

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
        params = head_views(
            self.scheme, self.arrays, dtype=self.dtype, xp=self.xp, rows=rows,
            query=self._tile_views(self.query, "query", rows),
            key=self._tile_views(self.key, "key", rows),
        )  # fmt: skip
        params.in_order = self.keys_in_order
        return params

    def _tile_views(self, side: Tokens, role: Role, rows: bool) -> Features:
        """The features of a side; with ``rows``, its segments too, if it has any."""
        own = side.features
        if rows and side.seg is not None:
            seg = side.seg if len(side.seg.shape) == 2 else side.seg[None, :]
            own = {**own, SEGMENT: seg[:, None, :]}
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
            side.with_features(without_prefix(side.features, prefix))
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

    def channel_decay(self) -> ChannelDecay:
        """How the channels of all scores decay; of a scheme that has such a decay."""
        return ChannelDecay(self.scheme, self.xp, self.dtype, self.arrays, self.query, self.key)

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
