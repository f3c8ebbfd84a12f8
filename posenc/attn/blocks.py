"""A call cut into blocks of queries and of keys: which of them meet, from their ranges alone.

Work and memory are ``O((L / n)**2)`` for blocks of ``n``, never ``L**2``.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from array_api_compat import device

from posenc.attn.call import Call
from posenc.protocol import Array, Namespace, Window

Range: TypeAlias = tuple[Array, Array]
"""Lowest and highest of every block, each ``(B or 1, n)``."""


def visible_blocks(call: Call, block: int) -> tuple[Array, Array]:
    """Pairs of blocks ``(B or 1, nq, nk)`` that may hold a visible pair of a query and a key, and
    those in which all pairs are visible.
    """
    query, key = call.query, call.key
    q_pos, k_pos = (block_ranges(side.pos, block, call.xp) for side in (query, key))
    q_seg, k_seg = (
        None if side.seg is None else block_ranges(side.seg, block, call.xp)
        for side in (query, key)
    )
    some, every = visible_between(
        q_pos, k_pos, q_seg, k_seg,
        causal=call.causal, window=call.window, sink_tokens=call.sink_tokens, xp=call.xp,
    )  # fmt: skip
    return some, every if call.mask is None else every & False


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
    """What ``visible_blocks`` returns, from the ranges of positions and segments."""
    (q_low, q_high), (k_low, k_high) = _facing(q_pos, k_pos)
    some = xp.ones_like(q_low - k_low, dtype=xp.bool)
    every = some
    if causal:
        some, every = some & (k_low <= q_high), every & (k_high <= q_low)
    if window is not None:
        inside, whole = _inside(q_low - k_high, q_high - k_low, window, some)
        if sink_tokens:
            inside = inside | ((k_high >= 0) & (k_low < sink_tokens))
            whole = whole | ((k_low >= 0) & (k_high < sink_tokens))
        some, every = some & inside, every & whole
    if q_seg is not None and k_seg is not None:
        (q_low, q_high), (k_low, k_high) = _facing(q_seg, k_seg)
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (k_low == q_high)
    return some, every


def _inside(nearest: Array, farthest: Array, window: Window, like: Array) -> tuple[Array, Array]:
    """Whether any, and whether every ``q_pos - k_pos`` between two ends is inside of a window."""
    left, right = window
    some = every = like | True
    if left is not None:
        some, every = some & (nearest <= left), every & (farthest <= left)
    if right is not None:
        some, every = some & (farthest >= -right), every & (nearest >= -right)
    return some, every


def block_ranges(values: Array, block: int, xp: Namespace) -> Range:
    """Lowest and highest of every block of integers ``(L,)`` or ``(B, L)``."""
    values = values[None, :] if len(values.shape) == 1 else values
    missing = -values.shape[-1] % block
    if missing:
        last = xp.broadcast_to(values[:, -1:], (values.shape[0], missing))
        values = xp.concat([values, last], axis=-1)
    cut = xp.reshape(values, (values.shape[0], -1, block))
    return xp.min(cut, axis=-1), xp.max(cut, axis=-1)


def block_max(values: Array, block: int, xp: Namespace) -> Array:
    """The highest number of every block along the last axis, ``(..., n)``."""
    missing = -values.shape[-1] % block
    whole = pad_neg_inf(values, 0, missing, xp) if missing else values
    return xp.max(xp.reshape(whole, (*whole.shape[:-1], -1, block)), axis=-1)


def pad_neg_inf(values: Array, before: int, after: int, xp: Namespace) -> Array:
    """With ``-inf`` before and after, along the last axis."""
    sides = (
        xp.full((*values.shape[:-1], n), -math.inf, dtype=values.dtype, device=device(values))
        for n in (before, after)
    )
    first, last = sides
    return xp.concat([first, values, last], axis=-1)


def _facing(q: Range, k: Range) -> tuple[Range, Range]:
    low, high = (a[:, :, None] for a in q)
    return (low, high), (k[0][:, None, :], k[1][:, None, :])
