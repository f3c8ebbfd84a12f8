"""Visibility between blocks of queries and blocks of keys, from their ranges of positions.

Work and memory are ``O((L / n)**2)`` for blocks of ``n`` tokens, never ``O(L**2)``.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from array_api_compat import device

from posenc.attn.call import Call
from posenc.protocol import Array, Namespace, Window

Range: TypeAlias = tuple[Array, Array]
"""Minimum and maximum of every block, each ``(B or 1, n)`` for ``n`` blocks."""


def visible_blocks(call: Call, block: int) -> tuple[Array, Array]:
    """``any_visible`` and ``all_visible``, booleans ``(B or 1, nq, nk)`` for each pair of blocks.

    ``any_visible`` is True if some pair of a query and a key in the blocks may be visible.
    ``all_visible`` is True only if all of their pairs are visible.
    """
    query, key = call.query, call.key
    q_pos, k_pos = (block_ranges(side.pos, block, call.xp) for side in (query, key))
    q_seg, k_seg = (
        None if side.seg is None else block_ranges(side.seg, block, call.xp)
        for side in (query, key)
    )
    any_visible, all_visible = visible_between(
        q_pos, k_pos, q_seg, k_seg,
        causal=call.causal, window=call.window, sink_tokens=call.sink_tokens, xp=call.xp,
    )  # fmt: skip
    return any_visible, all_visible if call.mask is None else all_visible & False


def visible_between(
    q_pos: Range,
    k_pos: Range,
    q_seg: Range | None,
    k_seg: Range | None,
    *,
    causal: bool,
    window: Window | None,
    sink_tokens: int = 0,
    xp: Namespace,
) -> tuple[Array, Array]:
    """``any_visible`` and ``all_visible`` as in ``visible_blocks``, from ranges of the blocks."""
    (q_low, q_high), (k_low, k_high) = _broadcast_ranges(q_pos, k_pos)
    any_visible = xp.ones_like(q_low - k_low, dtype=xp.bool)
    all_visible = any_visible
    if causal:
        any_visible, all_visible = any_visible & (k_low <= q_high), all_visible & (k_high <= q_low)
    if window is not None:
        any_inside, all_inside = _inside(q_low - k_high, q_high - k_low, window, any_visible)
        if sink_tokens:
            any_inside = any_inside | ((k_high >= 0) & (k_low < sink_tokens))
            all_inside = all_inside | ((k_low >= 0) & (k_high < sink_tokens))
        any_visible, all_visible = any_visible & any_inside, all_visible & all_inside
    if q_seg is not None and k_seg is not None:
        (q_low, q_high), (k_low, k_high) = _broadcast_ranges(q_seg, k_seg)
        any_visible = any_visible & (q_low <= k_high) & (k_low <= q_high)
        all_visible = all_visible & (q_low == k_high) & (k_low == q_high)
    return any_visible, all_visible


def _inside(low: Array, high: Array, window: Window, like: Array) -> tuple[Array, Array]:
    """Whether any, and whether all of ``q_pos - k_pos`` in ``low .. high`` are inside a window."""
    left, right = window
    any_inside = all_inside = like | True
    if left is not None:
        any_inside, all_inside = any_inside & (low <= left), all_inside & (high <= left)
    if right is not None:
        any_inside, all_inside = any_inside & (high >= -right), all_inside & (low >= -right)
    return any_inside, all_inside


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


def _broadcast_ranges(q: Range, k: Range) -> tuple[Range, Range]:
    """Ranges of queries and of keys that broadcast to ``(B or 1, nq, nk)``."""
    low, high = (a[:, :, None] for a in q)
    return (low, high), (k[0][:, None, :], k[1][:, None, :])
