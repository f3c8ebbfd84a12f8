"""Visibility between blocks of queries and blocks of keys, from their ranges of positions.

Work and memory are ``O((L / n)**2)`` for blocks of ``n`` tokens, never ``O(L**2)``.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from posenc.attn.call import Call
from posenc.attn.masks import Blocks, Mask
from posenc.contract.operations import device
from posenc.contract.protocol import Array, Namespace

Range: TypeAlias = tuple[Array, Array]
"""Minimum and maximum of every block, each ``(B or 1, n)`` for ``n`` blocks."""


def visible_blocks(call: Call, block: int) -> tuple[Array, Array]:
    """``any_visible`` and ``all_visible``, booleans ``(B or 1, nq, nk)`` for each pair of blocks.

    ``any_visible`` is True if some pair of a query and a key in the blocks may be visible.
    ``all_visible`` is True only if all of their pairs are visible.
    """
    query, key = call.query, call.key
    pos = [block_ranges(side.pos, block, call.xp) for side in (query, key)]
    seg = [
        None if side.seg is None else block_ranges(side.seg, block, call.xp)
        for side in (query, key)
    ]
    return visible_between(call.mask, *pos, *seg)


def visible_between(
    mask: Mask, q_pos: Range, k_pos: Range, q_seg: Range | None, k_seg: Range | None
) -> tuple[Array, Array]:
    """``any_visible`` and ``all_visible`` as in ``visible_blocks``, from ranges of the blocks."""
    any_visible, all_visible = mask.blocks(*_broadcast_ranges(q_pos, k_pos))
    assert any_visible is not None  # of a mask in normal form
    assert all_visible is not None
    if q_seg is not None and k_seg is not None:
        q, k = _broadcast_ranges(q_seg, k_seg)
        any_visible = any_visible & (q.low <= k.high) & (k.low <= q.high)
        all_visible = all_visible & (q.low == k.high) & (k.low == q.high)
    return any_visible, all_visible


def block_ranges(values: Array, block: int, xp: Namespace) -> Range:
    """Minimum and maximum of every block of integers ``(L,)`` or ``(B, L)``."""
    values = values[None, :] if len(values.shape) == 1 else values
    missing = -values.shape[-1] % block
    if missing:
        last = xp.broadcast_to(values[:, -1:], (values.shape[0], missing))
        values = xp.concat([values, last], axis=-1)
    blocks = xp.reshape(values, (values.shape[0], -1, block))
    return xp.min(blocks, axis=-1), xp.max(blocks, axis=-1)


def block_max(values: Array, block: int, xp: Namespace) -> Array:
    """Maximum of every block along the last axis, ``(..., n)``."""
    missing = -values.shape[-1] % block
    padded = pad_neg_inf(values, 0, missing, xp) if missing else values
    return xp.max(xp.reshape(padded, (*padded.shape[:-1], -1, block)), axis=-1)


def pad_neg_inf(values: Array, before: int, after: int, xp: Namespace) -> Array:
    """``values`` with ``-inf`` added before and after, along the last axis."""
    sides = (
        xp.full((*values.shape[:-1], n), -math.inf, dtype=values.dtype, device=device(values))
        for n in (before, after)
    )
    first, last = sides
    return xp.concat([first, values, last], axis=-1)


def _broadcast_ranges(q: Range, k: Range) -> tuple[Blocks, Blocks]:
    """Ranges of queries and of keys that broadcast to ``(B or 1, nq, nk)``."""
    return Blocks(*(a[:, :, None] for a in q)), Blocks(*(a[:, None, :] for a in k))
