"""Wall attention: each channel of a score decays by gates of its own.

The factor ``exp(P_i - P_j)`` of a channel is one of the query times one of the key in name only:
``exp(-P_j)`` alone leaves float32 after a few hundred tokens. So both are taken from an *anchor*
``a`` between them, a key with ``j <= a <= i``: ``exp(P_i - P_a)`` and ``exp(P_a - P_j)`` are 1 at
most, because ``P`` falls. Keys are sorted by segment and position and cut into blocks. The anchor
is the last key of a block, so one product of matrices serves a block and all queries after it. The
block that a query ends in has no such anchor: its pairs are computed by the definition. Nothing is
clamped, at any length and with any gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from array_api_compat import device

from posenc.contract.checks import check_channels
from posenc.contract.fields import Count, Finite
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec
from posenc.schemes.gates import log_sigmoid

_BLOCK = 16  # keys of a block; anchored queries take D / _BLOCK arrays of scores


@dataclass(frozen=True)
class Wall(
    PositionScheme,
    whole_rows="each channel of a score decays on its own, relative to an anchor between its query "
    "and its key",
    paper="Pai, Averbuch et al. 2026, a blog of Tilde Research with no paper",
):
    """``sum_n q_in k_jn exp(P_in - P_jn) / sqrt(D)``, where ``P`` sums ``log sigmoid(w x + 8)``.

    ``P_t (H, D)`` is the sum of the gates of the tokens up to ``t``, in the order of positions,
    within a segment; ``x_t`` are the hidden states. Gates of 0 are NoPE. If all channels of a head
    have one gate, a score is multiplied by ``exp(c_i - c_j)``, where FoX with these gates adds
    ``c_i - c_j``.

    Queries and keys are those given to attention, before a transform beside it in a ``Sum``. Keys
    after the query do not decay: it is for causal attention. A softcap caps their scores only.

    Learned array: ``w (H, D, C)``, at first normal with standard deviation 0.02. A first gate is
    about ``-exp(-8)``, so a channel remembers some 3000 tokens.

    Only the reference computes it, in memory of about ``10 + D / 5`` arrays of scores. A fused
    kernel would have to take its anchors tile by tile. The authors' further gate, which is added to
    scores, is ``Sum(Wall(...), FoX(...))``.

    Parameters
    ----------
    num_heads
        Number of query heads ``H``.
    head_dim
        Channels per head, ``D``.
    hidden_dim
        Width ``C`` of hidden states.
    offset
        What is added to ``w x``. 8 as released: at first nearly nothing is forgotten.

    blog.tilderesearch.com/blog/wall-attn; ``ops/wall_attn/naive.py`` of
    flash-linear-attention.
    """

    num_heads: Count
    head_dim: Count
    hidden_dim: Count
    offset: Finite = 8.0

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"w": ParamSpec((self.num_heads, self.head_dim, self.hidden_dim))}

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {
            "p": FeatureSpec(self._log_gates, of="key", cumulative=True),
            "q": FeatureSpec(self._query, of="query", reads="vectors"),
            "k": FeatureSpec(self._key, of="key", reads="vectors"),
        }

    def _log_gates(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        z = xp.matmul(x[:, None, :, :], xp.matrix_transpose(params["w"]))
        return log_sigmoid(z + self.offset, xp)

    def _query(self, q: Array, pos: Array, *, scale: float, **_: Any) -> Array:
        check_channels("q", q, self.head_dim)
        return scale * q

    def _key(self, k: Array, pos: Array, **_: Any) -> Array:
        return k

    def adjust_scores(
        self, scores: Array, q: Array, k: Array, *, visible: Array | None, params: Any,
        xp: Namespace,
    ) -> Array:  # fmt: skip
        queries, keys = params.query["q"][:], params.key["k"][:]
        if visible is not None:  # NaN in padding
            queries = xp.where(xp.any(visible, axis=-1)[..., None], queries, 0.0)
            keys = xp.where(xp.any(visible, axis=-2)[..., None], keys, 0.0)
        q_seg, k_seg = xp.zeros_like(q), xp.zeros_like(k)
        if "segment" in params.key:
            q_seg, k_seg = params.query["segment"], params.key["segment"]
        sees = (k_seg == q_seg) & (k <= q)
        # How many keys are sorted up to each query, and the block of the last of them.
        count = xp.sum(xp.astype((k_seg < q_seg) | sees, q.dtype), axis=-1)
        own = xp.where(count > 0, count - 1, 0) // _BLOCK  # (B or 1, 1, Q)
        order = _sorted(k_seg, k, xp)
        k_seg = xp.take_along_axis(k_seg + xp.zeros_like(order), order, axis=-1)[:, 0, 0, :]
        found = _Sorted(order[:, 0, 0, :], k_seg, xp).scores(
            queries, keys, params.query["p"][:], params.key["p"][:], own, q_seg[..., 0]
        )
        place = xp.broadcast_to(xp.argsort(order, axis=-1), found.shape)
        return xp.where(sees, xp.take_along_axis(found, place, axis=-1), scores)


def _sorted(seg: Array, pos: Array, xp: Namespace) -> Array:
    """The indices ``(B or 1, 1, 1, K)`` that sort keys by segment, and by position within one."""
    pos = pos + xp.zeros_like(seg)
    order = xp.argsort(pos, axis=-1, stable=True)
    seg = xp.take_along_axis(seg + xp.zeros_like(pos), order, axis=-1)
    return xp.take_along_axis(order, xp.argsort(seg, axis=-1, stable=True), axis=-1)


@dataclass(frozen=True)
class _Sorted:
    """Keys in the order ``order (B or 1, K)``, of segments ``seg (B or 1, K)`` in that order."""

    order: Array
    seg: Array
    xp: Namespace

    def scores(
        self, q: Array, k: Array, q_sum: Array, k_sum: Array, own: Array, q_seg: Array
    ) -> Array:
        """Decayed products ``(B, H, Q, K)`` of keys up to each query; finite for all.

        ``q``, ``q_sum (B, H, Q, D)``; ``k``, ``k_sum (B, H, K, D)``; of each query the block that
        it ends in and its segment, ``own``, ``q_seg (B or 1, 1, Q)``.
        """
        xp, length = self.xp, k.shape[2]
        k, k_sum = self._blocks(k), self._blocks(k_sum)  # (B, H, N, _BLOCK, D)
        anchor = k_sum[..., -1:, :]
        seg = xp.reshape(self._padded(self.seg), (self.seg.shape[0], 1, -1, _BLOCK, 1))
        of_key = xp.where(seg == seg[..., -1:, :], anchor - k_sum, 0.0)
        block = xp.arange(k.shape[2], dtype=own.dtype, device=device(own))[:, None]
        after = (own[..., None, :] > block) & (q_seg[..., None, :] == seg[..., -1, :])
        of_query = xp.where(after[..., None], q_sum[:, :, None, :, :] - anchor, 0.0)
        anchored = q[:, :, None, :, :] * xp.exp(of_query)  # (B, H, N, Q, D)
        found = xp.matmul(anchored, xp.matrix_transpose(k * xp.exp(of_key)))
        there = self._at(k, own), self._at(k_sum, own)  # (B, H, Q, _BLOCK, D)
        fall = q_sum[..., None, :] - there[1]
        fall = xp.where(fall > 0, 0.0, fall)  # of later keys and other segments
        direct = xp.sum(q[..., None, :] * there[0] * xp.exp(fall), axis=-1)
        is_own = (own[..., None, :] == block)[..., None]
        found = xp.where(is_own, direct[:, :, None, :, :], found)
        found = xp.permute_dims(found, (0, 1, 3, 2, 4))
        return xp.reshape(found, (*q.shape[:3], -1))[..., :length]

    def _padded(self, sorted_keys: Array) -> Array:
        """Whole blocks, ``(B or 1, K)``: the last key again and again."""
        xp, missing = self.xp, -sorted_keys.shape[-1] % _BLOCK
        last = xp.broadcast_to(sorted_keys[:, -1:], (sorted_keys.shape[0], missing))
        return xp.concat([sorted_keys, last], axis=-1)

    def _blocks(self, values: Array) -> Array:
        """``values (B, H, K, D)`` in order, ``(B, H, N, _BLOCK, D)``."""
        order = self._padded(self.order)[:, None, :, None]
        shape = (*values.shape[:2], order.shape[2], values.shape[3])
        values = self.xp.take_along_axis(values, self.xp.broadcast_to(order, shape), axis=2)
        return self.xp.reshape(values, (*shape[:2], -1, _BLOCK, shape[3]))

    def _at(self, blocks: Array, own: Array) -> Array:
        """The block of each query, ``(B, H, Q, _BLOCK, D)``."""
        batch, heads, _, size, dim = blocks.shape
        flat = self.xp.reshape(blocks, (batch, heads, -1, size * dim))
        index = self.xp.astype(own, self.order.dtype)[..., None]
        index = self.xp.broadcast_to(index, (batch, heads, own.shape[-1], size * dim))
        found = self.xp.take_along_axis(flat, index, axis=2)
        return self.xp.reshape(found, (batch, heads, -1, size, dim))
