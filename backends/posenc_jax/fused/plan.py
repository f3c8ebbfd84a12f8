"""What a fused kernel computes from: a call cut into blocks, and its bias in a form for kernels.

A bias reaches a kernel in one of two forms. *Elementwise*: the scheme's own ``bias`` on a tile. It
may read per-head scalars, and at most one scalar feature per query and one per key. ALiBi, KERPLE,
FoX and their sums are elementwise. *By distance*: a table of values per distance, as T5 has at the
default positions. Tiles so far from the diagonal that their bias is constant are *far*: the table
leaves them out, and a kernel reads one number per head for them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array

from posenc.backend import Features, Namespace, Params, PositionScheme, Window, visible
from posenc_jax.fused.reads import BiasReads

Form: TypeAlias = Literal["none", "elementwise", "by distance"]

MASK_VALUE = -1e30  # the score of a masked pair
MIN_SCORE = MASK_VALUE / 2  # the running maximum starts here, so a masked score has weight 0


class Tokens(NamedTuple):
    """Queries or keys of a tile, as a bias reads them: positions, and one feature or None."""

    pos: Array
    feature: Array | None = None


@dataclass(frozen=True)
class Plan:
    """The static part of a call.

    Attributes
    ----------
    scheme, causal, window, first_tokens, scale
        As in ``posenc.attn.call.Call``.
    form
        The form of the bias.
    reads
        What an elementwise bias reads.
    aligned
        Query ``i`` is at position ``k_len - q_len + i``, key ``j`` at ``j``; no positions are
        given.
    q_len, k_len
        Lengths without padding.
    block
        Queries per block, and keys per block.
    near
        Of a bias by distance: the tiles that are not far, as a range of diagonals ``first, end``.
        Block ``a`` of queries and block ``b`` of keys lie on diagonal ``b - a``.
    """

    scheme: PositionScheme
    form: Form
    reads: BiasReads
    causal: bool
    window: Window | None
    first_tokens: int
    scale: float
    aligned: bool
    q_len: int
    k_len: int
    block: int
    near: tuple[int, int] = (0, 0)

    @classmethod
    def of_one_block(cls, scheme: PositionScheme, reads: BiasReads, size: int) -> Plan:
        """One block with an elementwise bias, to check whether a kernel with it lowers."""
        return cls(
            scheme=scheme, form="elementwise", reads=reads, causal=False, window=None,
            first_tokens=0, scale=1.0, aligned=True, q_len=size, k_len=size, block=size,
        )  # fmt: skip

    @property
    def q_blocks(self) -> int:
        """Number of blocks of queries."""
        return -(-self.q_len // self.block)

    @property
    def k_blocks(self) -> int:
        """Number of blocks of keys."""
        return -(-self.k_len // self.block)

    @property
    def has_far(self) -> bool:
        """Whether there are far tiles."""
        return self.has_far_before or self.has_far_after

    @property
    def has_far_before(self) -> bool:
        """Whether there are far tiles before the near ones."""
        return self.form == "by distance" and self.near[0] > 1 - self.q_blocks

    @property
    def has_far_after(self) -> bool:
        """Whether there are far tiles after the near ones; a causal mask hides them."""
        return self.form == "by distance" and self.near[1] < self.k_blocks and not self.causal

    def near_keys(self, q_block: Array) -> tuple[Array, Array]:
        """Key blocks ``first .. end - 1`` are near; some of them may not exist."""
        first, end = self.near
        return q_block + first, q_block + end

    def near_queries(self, k_block: Array) -> tuple[Array, Array]:
        """Query blocks ``first .. end - 1`` are near; some of them may not exist."""
        first, end = self.near
        return k_block - (end - 1), k_block - (first - 1)

    @property
    def masks_padding(self) -> bool:
        """Whether padded keys must be masked; an aligned causal mask already masks them."""
        return self.k_len % self.block != 0 and not (self.aligned and self.causal)

    def bias(
        self, head_scalars: Sequence[Array], q: Tokens, k: Tokens, xp: Namespace = jnp
    ) -> Array:
        """The bias on a tile, from the scalars of one head, positions and features."""
        params = self._params(head_scalars, q.feature, k.feature)
        bias: Array | None = self.scheme.bias(q.pos, k.pos, params=params, xp=xp)
        assert bias is not None
        return bias

    def key_bias(self, head_scalars: Sequence[Array], k: Array, xp: Namespace = jnp) -> Array:
        """``w(k)`` of some positions, from the scalars of one head; for a plan ``by_key``."""
        params = self._params(head_scalars, None, None)
        bias: Array | None = self.scheme.key_bias(k, params=params, xp=xp)
        assert bias is not None
        return bias

    def _params(
        self, head_scalars: Sequence[Array], query: Array | None, key: Array | None
    ) -> Params:
        return Params(
            dict(zip(self.reads.scalars, head_scalars, strict=True)),
            jnp.float32,
            Features(dict.fromkeys(self.reads.query, query), "query"),
            Features(dict.fromkeys(self.reads.key, key), "key"),
        )

    def mask(
        self,
        q_pos: Array,
        k_pos: Array,
        k_index: Array,
        q_seg: Array | None = None,
        k_seg: Array | None = None,
    ) -> Array | None:
        """Which pairs of a tile are visible; None if all are."""
        mask: Array | None = visible(
            q_pos, k_pos, q_seg, k_seg,
            causal=self.causal, window=self.window, first_tokens=self.first_tokens,
        )  # fmt: skip
        if not self.masks_padding:
            return mask
        exists = k_index < self.k_len
        return exists if mask is None else mask & exists

    def needs_mask(
        self, q_start: Any, q_count: int, k_start: Any, k_count: int, *, has_segments: bool
    ) -> Any:
        """Whether a tile may have a masked pair: a bool if it is static, or a scalar of a kernel.

        The tile has ``q_count`` queries, the first at default position ``q_start``, and ``k_count``
        keys from ``k_start`` on.
        """
        left, right = self.window or (None, None)
        if self.causal and right is not None and right >= 0:
            right = None  # the causal mask covers it
        by_position = self.causal or left is not None or right is not None
        if has_segments or (by_position and not self.aligned):
            return True
        # The least and the greatest query position - key position of the tile.
        least = q_start - (k_start + k_count - 1)
        most = q_start + q_count - 1 - k_start
        terms = [k_start + k_count > self.k_len] if self.masks_padding else []
        if self.causal and right is None:
            terms.append(least < 0)
        if left is not None:
            terms.append(most > left)
        if right is not None:
            terms.append(least < -right)
        return functools.reduce(operator.or_, terms) if terms else False


class Operands(NamedTuple):
    """The float arrays of a call, padded to whole blocks: ``Q`` and ``K`` are multiples of a block.

    Attributes
    ----------
    q, k, v
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``, with zeros as padding.
    head_scalars
        ``(H, P)`` float32: the per-head scalars of an elementwise bias; otherwise None.
    table
        ``(H, m + 1, n)`` float32: a bias by distance, on the ``m`` near diagonals of tiles from
        ``first``; otherwise None. Blocks have ``n`` tokens. Flatten the last two axes: entry ``x``
        is the bias at ``j - i = x + (first - 1) * n + 1`` for query ``i`` and key ``j``. Query
        block ``a`` and key block ``b`` read rows ``d`` and ``d + 1``, where ``d = b - a - first``.
    far
        ``(H, 2)`` float32: the bias of far tiles before the near ones, and after; or None.
    q_feature, k_feature
        ``(B, H, Q)`` and ``(B, H, K)`` float32: the feature that the bias reads; or None.
    """

    q: Array
    k: Array
    v: Array
    head_scalars: Array | None
    table: Array | None
    far: Array | None
    q_feature: Array | None
    k_feature: Array | None


class Integers(NamedTuple):
    """The integer arrays of a call, which have no gradient.

    Attributes
    ----------
    q_pos, k_pos
        ``(B, Q)`` and ``(B, K)`` int32; None if aligned.
    q_seg, k_seg
        Likewise; None without segments.
    key_ranges
        ``(2, B, H, nq)`` int32: a block of queries needs key blocks ``first .. end - 1``.
    query_ranges
        ``(2, B, H, nk)`` int32: query blocks ``first .. end - 1`` need a block of keys.
    """

    q_pos: Array | None
    k_pos: Array | None
    q_seg: Array | None
    k_seg: Array | None
    key_ranges: Array
    query_ranges: Array
