"""Scores whose channels decay: products relative to an anchor between query and key.

The factor ``exp(c(i, j))`` of a channel is one of the query times one of the key in name only: with
``c(i, j) = P_i - P_j``, ``exp(-P_j)`` alone leaves float32 after a few hundred tokens. So both are
taken from an *anchor* ``a`` between them, a token with ``j <= a <= i``: ``exp(c(i, a))`` and
``exp(c(a, j))`` are 1 at most. Nothing is clamped, at any length and with any gates.

==================  ===============================================================================
keys                anchor
==================  ===============================================================================
before all queries  the first query: one product of matrices serves all pairs
any                 keys are sorted by segment and position and cut into blocks of 16. The anchor is
                    the last key of a block, for all queries after it. The block that a query ends
                    in has no such anchor: its pairs are computed by the definition
==================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from posenc.apply.feature_needs import summed_features
from posenc.apply.shapes import common_size
from posenc.attn.segment_sums import in_order_of_positions
from posenc.contract.operations import device, is_exporting
from posenc.contract.params import Features, Params
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme
from posenc.contract.tokens import Tokens

_BLOCK = 16  # keys of a block; anchored queries take D / _BLOCK arrays of scores


def has_channel_decay(scheme: PositionScheme) -> bool:
    """Whether the channels of a scheme's scores decay."""
    return Hook.CHANNEL_DECAY in scheme.hooks()


class _At(NamedTuple):
    """Tokens: positions ``(B or 1, 1, ..., 1)`` and features ``(B or 1, H or 1, ..., M)``."""

    pos: Array
    features: Mapping[str, Array]

    def map(self, function: Callable[[Array], Array]) -> _At:
        """The same tokens with ``function`` applied to each array."""
        return _At(function(self.pos), {n: function(a) for n, a in self.features.items()})


@dataclass(frozen=True)
class ChannelDecay:
    """How the channels of scores decay between some queries and some keys.

    Attributes
    ----------
    scheme, xp, dtype
        As in ``Call``.
    arrays
        Learned arrays and constants of the same heads as features.
    query, key
        Tokens with positions and segments ``(L,)``, ``(B or 1, L)`` or ``(B or 1, 1, L)``, and
        features.
    """

    scheme: PositionScheme
    xp: Namespace
    dtype: Any
    arrays: Mapping[str, Array]
    query: Tokens
    key: Tokens

    def apply(self, scores: Array, q: Array, k: Array) -> Array:
        """``scores (B, H, Q, K)``, with those of keys up to the query decayed.

        ``q (B, H, Q, D)`` are scaled queries, ``k (B, H, K, D)`` keys.
        """
        # Blocks would fix the length in a program that torch.export makes.
        own = self._pair_scores if is_exporting(self.xp) else self._sorted_scores
        found, sees = own(q, k)
        return self.xp.where(sees, found, scores)

    def pairs(self) -> Array:
        """The decay of every pair by its definition, ``(B or 1, H or 1, Q, K, D or 1)``."""
        q, k, params = self.of_pairs()
        found: Array = self.scheme.channel_decay(q, k, params=params, xp=self.xp)
        return found

    def of_pairs(self) -> tuple[Array, Array, Params]:
        """The arguments of ``channel_decay`` for every pair."""
        query, key = self._at("query").map(_with_keys), self._at("key").map(_with_queries)
        return query.pos, key.pos, self._params(query, key)

    def select(self, queries: slice, keys: slice) -> ChannelDecay:
        """The same of some of the queries and keys."""
        return replace(self, query=self.query.select(queries), key=self.key.select(keys))

    def lies_before(self) -> Array:
        """Which keys ``anchored`` serves, ``(B or 1, K)``.

        Those at the first query or before it, and those of other segments, which no query sees; no
        key if the queries have several segments.
        """
        xp, q_pos, k_pos = self.xp, _row(self.query.pos), _row(self.key.pos)
        before = k_pos <= xp.min(q_pos, axis=-1, keepdims=True)
        if self.query.seg is not None and self.key.seg is not None:
            q_seg, k_seg = _row(self.query.seg), _row(self.key.seg)
            one = q_seg[..., :1]
            before = (before | (k_seg != one)) & xp.all(q_seg == one, axis=-1, keepdims=True)
        return before[:, 0, :]

    def anchored(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries and keys whose product is that of ``apply``, where all keys ``lies_before``."""
        xp, query, key = self.xp, self._at("query"), self._at("key")
        first = xp.argmin(query.pos, axis=2, keepdims=True)
        anchor = query.map(lambda a: _take(a, first, xp))
        of_query, of_key = self._at_most_0(query, anchor), self._at_most_0(anchor, key)
        return q * xp.exp(self._checked(of_query, q.shape[3])), k * xp.exp(of_key)

    def _at(self, role: str) -> _At:
        """Tokens with an axis of channels, ``(B or 1, H or 1, L, M)``."""
        side: Tokens = getattr(self, role)
        # All that an anchor has of both: it stands for a query and for a key.
        features = {name: (side.features or {})[name] for name in summed_features(self.scheme)}
        wide = {n: a if len(a.shape) == 4 else a[..., None] for n, a in features.items()}
        return _At(_row(side.pos)[..., None], wide)

    def _between(self, query: _At, key: _At) -> Array:
        params = self._params(query, key)
        found: Array = self.scheme.channel_decay(query.pos, key.pos, params=params, xp=self.xp)
        return found

    def _params(self, query: _At, key: _At) -> Params:
        specs, between = self.scheme.param_specs(), len(query.pos.shape) - 3

        def view(name: str, array: Array) -> Array:
            if name in specs and not specs[name].per_head:
                return array
            heads, *rest = array.shape
            return self.xp.reshape(array, (heads, *[1] * between, *(rest or [1])))

        return Params(
            {name: view(name, array) for name, array in self.arrays.items()}, self.dtype,
            Features(query.features, "query"), Features(key.features, "key"),
        )  # fmt: skip

    def _checked(self, decay: Array, channels: int) -> Array:
        if decay.shape[-1] in (1, channels):
            return decay
        raise ValueError(
            f"q has {channels} channels, the channel_decay of {type(self.scheme).__name__} "
            f"{decay.shape[-1]}"
        )

    def _at_most_0(self, query: _At, key: _At) -> Array:
        """The decay; 0 for later keys and other segments, whose factors could overflow."""
        found = self._between(query, key)
        return self.xp.where(found > 0, 0.0, found)

    def _integers(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Positions of queries and keys, and segments, ``(B or 1, 1, L)``."""
        pos = _row(self.query.pos), _row(self.key.pos)
        if self.query.seg is None or self.key.seg is None:
            return pos, (self.xp.zeros_like(pos[0]), self.xp.zeros_like(pos[1]))
        return pos, (_row(self.query.seg), _row(self.key.seg))

    def _pair_scores(self, q: Array, k: Array) -> tuple[Array, Array]:
        """As ``_sorted_scores``, by the definition; holds ``B H Q K D`` numbers."""
        xp, ((q_pos, k_pos), (q_seg, k_seg)) = self.xp, self._integers()
        sees = (k_seg[..., None, :] == q_seg[..., None]) & (k_pos[..., None, :] <= q_pos[..., None])
        fall = self._checked(xp.where(sees[..., None], self.pairs(), 0.0), q.shape[3])
        found = q[..., :, None, :] * k[..., None, :, :] * xp.exp(xp.where(fall > 0, 0.0, fall))
        return xp.sum(found, axis=-1), sees

    def _sorted_scores(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Decayed products ``(B, H, Q, K)`` of keys up to each query, finite for all; and which."""
        xp, ((q_pos, k_pos), (q_seg, k_seg)) = self.xp, self._integers()
        of_q, of_k = q_seg[..., None], k_seg[..., None, :]
        sees = (of_k == of_q) & (k_pos[..., None, :] <= q_pos[..., None])  # (B or 1, 1, Q, K)
        # How many keys are sorted up to each query, and the block of the last of them.
        count = xp.sum(xp.astype((of_k < of_q) | sees, q_pos.dtype), axis=-1)
        own = xp.where(count > 0, count - 1, 0) // _BLOCK  # (B or 1, 1, Q)
        batch = common_size(k_pos.shape[0], k_seg.shape[0])
        order = in_order_of_positions(Tokens(k_pos[:, 0, :], k_seg[:, 0, :]), batch, xp)[:, None, :]
        key = self._at("key").map(lambda a: _blocks(a, order, xp))
        seg = _blocks(k_seg[..., None], order, xp)  # (B or 1, 1, N, _BLOCK, 1)
        found = self._of_blocks(q, _blocks(k, order, xp), key, seg, own, q_seg)
        place = xp.argsort(order, axis=-1)[..., None]
        return xp.matrix_transpose(_take(xp.matrix_transpose(found), place, xp)), sees

    def _of_blocks(
        self, q: Array, k: Array, key: _At, seg: Array, own: Array, q_seg: Array
    ) -> Array:
        """The products of sorted keys, ``(B, H, Q, N * _BLOCK)``.

        ``k``, ``key`` and ``seg`` are blocks ``(B or 1, H or 1, N, _BLOCK, ...)``. ``own`` and
        ``q_seg (B or 1, 1, Q)``: of each query the block that it ends in, and its segment.
        """
        xp, query = self.xp, self._at("query")
        anchor = key.map(lambda a: a[..., -1:, :])  # (B or 1, H or 1, N, 1, M)
        of_key = xp.where(seg == seg[..., -1:, :], self._between(anchor, key), 0.0)
        block = xp.arange(k.shape[2], dtype=own.dtype, device=device(own))[:, None]
        after = (own[..., None, :] > block) & (q_seg[..., None, :] == seg[..., -1, :])
        asked = query.map(lambda a: a[:, :, None, :, :])
        of_query = xp.where(after[..., None], self._between(asked, anchor), 0.0)
        of_query = self._checked(of_query, q.shape[3])
        anchored = q[:, :, None, :, :] * xp.exp(of_query)  # (B, H, N, Q, D)
        found = xp.matmul(anchored, xp.matrix_transpose(k * xp.exp(of_key)))
        asked, there = query.map(_with_keys), key.map(lambda a: _at_block(a, own, xp))
        fall = self._at_most_0(asked, there)  # (B, H, Q, _BLOCK, D)
        direct = xp.sum(q[..., None, :] * _at_block(k, own, xp) * xp.exp(fall), axis=-1)
        is_own = (own[..., None, :] == block)[..., None]
        found = xp.where(is_own, direct[:, :, None, :, :], found)
        found = xp.permute_dims(found, (0, 1, 3, 2, 4))
        return xp.reshape(found, (*q.shape[:3], block.shape[0] * _BLOCK))


def _with_keys(queries: Array) -> Array:
    return queries[..., :, None, :]


def _with_queries(keys: Array) -> Array:
    return keys[..., None, :, :]


def _row(integers: Array) -> Array:
    """``(L,)``, ``(B, L)`` or ``(B, 1, L)`` as ``(B or 1, 1, L)``."""
    if len(integers.shape) == 1:
        return integers[None, None, :]
    return integers[:, None, :] if len(integers.shape) == 2 else integers


def _take(values: Array, index: Array, xp: Namespace) -> Array:
    """``values (B or 1, H or 1, L, M)`` at the tokens ``index (B or 1, 1, N, 1)``."""
    # By rows: take_along_axis would read an index for each number.
    own, heads, length, width = values.shape
    batch, count = common_size(own, index.shape[0]), index.shape[2]
    index = xp.broadcast_to(index[:, 0, :, 0], (batch, count))
    if own != 1:
        first = length * xp.arange(own, dtype=index.dtype, device=device(index))
        index = index + first[:, None]
    rows = xp.reshape(xp.permute_dims(values, (0, 2, 1, 3)), (own * length, heads, width))
    found = xp.take(rows, xp.reshape(index, (-1,)), axis=0)
    return xp.permute_dims(xp.reshape(found, (batch, count, heads, width)), (0, 2, 1, 3))


def _blocks(values: Array, order: Array, xp: Namespace) -> Array:
    """``values (B or 1, H or 1, K, M)`` in an order ``(B or 1, 1, K)``, in blocks.

    The last block ends with the last key again and again.
    """
    length = order.shape[-1]
    count = (length + _BLOCK - 1) // _BLOCK
    # Not joined from two parts: jax.export would not know that their lengths make whole blocks.
    place = xp.arange(count * _BLOCK, dtype=order.dtype, device=device(order))
    padded = xp.take(order, xp.where(place < length, place, length - 1), axis=-1)
    found = _take(values, padded[..., None], xp)
    return xp.reshape(found, (*found.shape[:2], count, _BLOCK, found.shape[-1]))


def _at_block(blocks: Array, own: Array, xp: Namespace) -> Array:
    """The block of each query, ``(B or 1, H or 1, Q, _BLOCK, M)``."""
    _, _, count, size, dim = blocks.shape
    flat = xp.reshape(blocks, (*blocks.shape[:2], count, size * dim))
    index = xp.astype(own, xp.arange(1).dtype)[..., None]
    found = _take(flat, index, xp)
    return xp.reshape(found, (*found.shape[:3], size, dim))
