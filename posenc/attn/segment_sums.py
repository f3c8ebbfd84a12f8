"""Sums over the tokens of a segment in the order of positions, without a matrix of ``L x L``.

Tokens are sorted by segment and position; then each takes the sum of the 1, 2, 4, ... tokens before
it that are of its segment. That is ``O(L log L)`` work in ``O(L)`` memory, and no sum is a
difference of two larger ones, so that float32 keeps its digits however long a packed row is.
"""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import device

from posenc.evaluate import as_column, as_row
from posenc.protocol import Array, Namespace


class Tokens(NamedTuple):
    """Where sums are read: positions ``(L,)`` or ``(B, L)``, and segments or None."""

    pos: Array
    seg: Array | None


def segment_sums(
    values: Array, at: Tokens, readers: Tokens, *, xp: Namespace
) -> tuple[Array, Array]:
    """Sums up to the positions of the tokens, and of readers.

    Parameters
    ----------
    values
        ``(B, H, K)`` or ``(B, H, K, M)``.
    at
        Where these tokens stand.
    readers
        Other positions at which the sums are read, ``Q`` of them.

    Returns
    -------
    ``(B, H, K, ...)`` and ``(B, H, Q, ...)``: the sum over all tokens of the same segment at this
    position or before it; 0 where there is none.
    """
    if _exported(xp):
        return tuple(_by_product(values, at, where, xp) for where in (at, readers))
    batch, k_len = values.shape[0], values.shape[2]
    pos, seg = (_joined(k, q, batch, xp) for k, q in zip(at, readers, strict=True))
    assert pos is not None
    order = xp.argsort(pos, axis=-1, stable=True)
    if seg is not None:
        by_segment = xp.argsort(xp.take_along_axis(seg, order, axis=-1), axis=-1, stable=True)
        order = xp.take_along_axis(order, by_segment, axis=-1)
    missing = pos.shape[-1] - k_len
    zeros = xp.zeros(
        (*values.shape[:2], missing, *values.shape[3:]), dtype=values.dtype, device=device(values)
    )
    sums = _along(xp.concat([values, zeros], axis=2), order, xp)
    own = [xp.take_along_axis(a, order, axis=-1) for a in (seg, pos) if a is not None]
    start = _first_of_run(own[:-1], pos, xp)
    sums = _running_sum(sums, start, xp)
    # Tokens that share a position see each other: they take the sum at the last of them.
    last = (
        pos.shape[-1]
        - 1
        - xp.flip(_first_of_run([xp.flip(a, axis=-1) for a in own], pos, xp), axis=-1)
    )
    back = xp.argsort(order, axis=-1)
    found = _along(sums, xp.take_along_axis(last, back, axis=-1), xp)
    return found[:, :, :k_len, ...], found[:, :, k_len:, ...]


def _exported(xp: Namespace) -> bool:
    """Whether ``torch.export`` makes a program, in which doubling would fix the length."""
    compiler = getattr(xp, "compiler", None)
    return bool(getattr(compiler, "is_exporting", bool)())


def _by_product(values: Array, at: Tokens, where: Tokens, xp: Namespace) -> Array:
    """The same sums from one product with a matrix of ``L x L``."""
    counted = as_row(at.pos) <= as_column(where.pos)
    if at.seg is not None and where.seg is not None:
        counted = counted & (as_row(at.seg) == as_column(where.seg))
    counted = xp.astype(counted, values.dtype)
    if len(values.shape) == 4:
        return xp.matmul(counted, values)
    return xp.matmul(counted, values[..., None])[..., 0]


def _joined(k: Array | None, q: Array | None, batch: int, xp: Namespace) -> Array | None:
    """Integers of tokens and of readers one after the other, ``(B, K + Q)``."""
    if k is None or q is None:
        return None
    wide = xp.arange(1).dtype  # an index, and wide enough for both
    both = (xp.broadcast_to(xp.astype(a, wide), (batch, a.shape[-1])) for a in (k, q))
    return xp.concat(list(both), axis=-1)


def _along(values: Array, order: Array, xp: Namespace) -> Array:
    """``values (B, H, L, ...)`` in another order ``(B, L)``."""
    index = order[:, None, :] if len(values.shape) == 3 else order[:, None, :, None]
    return xp.take_along_axis(values, xp.broadcast_to(index, values.shape), axis=2)


def _first_of_run(keys: list[Array], like: Array, xp: Namespace) -> Array:
    """For each place of sorted rows, the first place with the same keys, ``(B, L)``."""
    index = xp.arange(like.shape[-1], dtype=like.dtype, device=device(like))
    first = xp.zeros_like(like)
    for own in keys:
        changed = own[:, 1:] != own[:, :-1]
        begins = xp.where(changed, index[1:], 0)
        first = xp.maximum(first, xp.concat([xp.zeros_like(first[:, :1]), begins], axis=-1))
    step = 1
    while step < like.shape[-1]:  # the highest so far
        higher = xp.maximum(first[:, step:], first[:, :-step])
        first = xp.concat([first[:, :step], higher], axis=-1)
        step *= 2
    return first


def _running_sum(values: Array, start: Array, xp: Namespace) -> Array:
    """Sums from ``start (B, L)`` up to each place, along axis 2."""
    index = xp.arange(start.shape[-1], dtype=start.dtype, device=device(start))
    room = (index - start)[:, None, :]  # so many places are before each one in its run
    room = room if len(values.shape) == 3 else room[..., None]
    step = 1
    while step < values.shape[2]:
        inside = room[:, :, step:, ...] >= step
        moved = xp.where(inside, values[:, :, :-step, ...], 0.0)
        values = xp.concat([values[:, :, :step, ...], values[:, :, step:, ...] + moved], axis=2)
        step *= 2
    return values
