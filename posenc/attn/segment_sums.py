"""Cumulative sums within segments, in the order of positions, without an ``L x L`` matrix.

Tokens are sorted by segment and position. Then each token adds the sum of the 1, 2, 4, ... tokens
before it in its segment. This takes ``O(L log L)`` work and ``O(L)`` memory. No sum is a difference
of two larger ones, so float32 keeps its precision in long packed rows.
"""

from __future__ import annotations

from posenc.apply.shapes import as_column, as_row
from posenc.contract.operations import device, is_exporting, take_along_axis
from posenc.contract.protocol import Array, Namespace
from posenc.contract.tokens import Tokens


def segment_sums(
    values: Array, key: Tokens, query: Tokens, *, xp: Namespace
) -> tuple[Array, Array]:
    """Cumulative sums of values of keys, read at the keys and at the queries.

    Parameters
    ----------
    values
        One value per key, ``(B, H, K)`` or ``(B, H, K, M)``.
    key, query
        The ``K`` keys and the ``Q`` queries, of which positions and segments are read.

    Returns
    -------
    ``(B, H, K, ...)`` and ``(B, H, Q, ...)``: for each key and each query, the sum over all keys of
    its segment at its position or before it; 0 if there is none.
    """
    batch, k_len = values.shape[0], values.shape[2]
    if is_exporting(xp):  # the loop over powers of 2 would fix the length
        return tuple(_sums_by_matmul(values, key, readers, xp) for readers in (key, query))
    if not isinstance(k_len, int):  # a symbol of jax.export, with which a loop cannot be counted
        return tuple(_sums_over_pairs(values, key, readers, xp) for readers in (key, query))
    pos = _concat_integers(key.pos, query.pos, batch, xp)
    seg = _concat_integers(key.seg, query.seg, batch, xp)
    assert pos is not None
    order = in_order_of_positions(Tokens(pos, seg), batch, xp)
    q_len = pos.shape[-1] - k_len
    zeros = xp.zeros(  # queries add nothing to the sums
        (*values.shape[:2], q_len, *values.shape[3:]), dtype=values.dtype, device=device(values)
    )
    sums = _take_tokens(xp.concat([values, zeros], axis=2), order, xp)
    own = [take_along_axis(a, order, axis=-1, xp=xp) for a in (seg, pos) if a is not None]
    start = _first_of_run(own[:-1], pos, xp)
    sums = _running_sum(sums, start, xp)
    # Tokens with the same position see each other: each takes the sum at the last of them.
    last = (
        pos.shape[-1]
        - 1
        - xp.flip(_first_of_run([xp.flip(a, axis=-1) for a in own], pos, xp), axis=-1)
    )
    back = xp.argsort(order, axis=-1)
    sums = _take_tokens(sums, take_along_axis(last, back, axis=-1, xp=xp), xp)
    return sums[:, :, :k_len, ...], sums[:, :, k_len:, ...]


def in_order_of_positions(tokens: Tokens, batch: int, xp: Namespace) -> Array:
    """The indices ``(batch, L)`` that sort tokens by segment, and by position within one."""
    shape = (batch, tokens.pos.shape[-1])
    order = xp.argsort(xp.broadcast_to(tokens.pos, shape), axis=-1, stable=True)
    if tokens.seg is None:
        return order
    seg = take_along_axis(xp.broadcast_to(tokens.seg, shape), order, axis=-1, xp=xp)
    return take_along_axis(order, xp.argsort(seg, axis=-1, stable=True), axis=-1, xp=xp)


def _sums_by_matmul(values: Array, key: Tokens, readers: Tokens, xp: Namespace) -> Array:
    """The same sums, as a product with an ``L x L`` matrix."""
    counted = xp.astype(_counted(key, readers), values.dtype)
    if len(values.shape) == 4:
        return xp.matmul(counted, values)
    return xp.matmul(counted, values[..., None])[..., 0]


def _sums_over_pairs(values: Array, key: Tokens, readers: Tokens, xp: Namespace) -> Array:
    """The same sums, of ``L x L`` terms that XLA adds as it makes them.

    A product of matrices would hold fewer, and could round them as the processor's products do.
    """
    counted = _counted(key, readers)
    if len(values.shape) == 4:
        return xp.sum(xp.where(counted[..., None], values[:, :, None, :, :], 0.0), axis=3)
    return xp.sum(xp.where(counted, values[:, :, None, :], 0.0), axis=3)


def _counted(key: Tokens, readers: Tokens) -> Array:
    """Which keys ``(..., L)`` are in the sum of each reader ``(..., L, 1)``."""
    counted = as_row(key.pos) <= as_column(readers.pos)
    if key.seg is not None and readers.seg is not None:
        counted = counted & (as_row(key.seg) == as_column(readers.seg))
    return counted


def _concat_integers(k: Array | None, q: Array | None, batch: int, xp: Namespace) -> Array | None:
    """Integers of keys and of queries in one array ``(B, K + Q)``; None if either is None."""
    if k is None or q is None:
        return None
    wide = xp.arange(1).dtype  # an index, and wide enough for both
    both = (xp.broadcast_to(xp.astype(a, wide), (batch, a.shape[-1])) for a in (k, q))
    return xp.concat(list(both), axis=-1)


def _take_tokens(values: Array, order: Array, xp: Namespace) -> Array:
    """``values (B, H, L, ...)`` at the token indices ``order (B, L)``."""
    index = order[:, None, :] if len(values.shape) == 3 else order[:, None, :, None]
    return take_along_axis(values, xp.broadcast_to(index, values.shape), axis=2, xp=xp)


def _first_of_run(keys: list[Array], like: Array, xp: Namespace) -> Array:
    """For each index of sorted rows, the first index with the same ``keys``, ``(B, L)``."""
    index = xp.arange(like.shape[-1], dtype=like.dtype, device=device(like))
    first = xp.zeros_like(like)
    for own in keys:
        changed = own[:, 1:] != own[:, :-1]
        begins = xp.where(changed, index[1:], 0)
        first = xp.maximum(first, xp.concat([xp.zeros_like(first[:, :1]), begins], axis=-1))
    step = 1
    while step < like.shape[-1]:  # a cumulative maximum
        higher = xp.maximum(first[:, step:], first[:, :-step])
        first = xp.concat([first[:, :step], higher], axis=-1)
        step *= 2
    return first


def _running_sum(values: Array, start: Array, xp: Namespace) -> Array:
    """Sums from index ``start (B, L)`` up to each index, along axis 2."""
    index = xp.arange(start.shape[-1], dtype=start.dtype, device=device(start))
    preceding = (index - start)[:, None, :]  # number of tokens before this one in its run
    preceding = preceding if len(values.shape) == 3 else preceding[..., None]
    step = 1
    while step < values.shape[2]:
        same_run = preceding[:, :, step:, ...] >= step
        shifted = xp.where(same_run, values[:, :, :-step, ...], 0.0)
        values = xp.concat([values[:, :, :step, ...], values[:, :, step:, ...] + shifted], axis=2)
        step *= 2
    return values
