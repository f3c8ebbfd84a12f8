"""Hidden states of a token and of the few before it, in the order of positions.

A short causal convolution over tokens reads them (Selective RoPE, PaTH). The convolution itself is
then a function of one token, so caches, packing and shuffled tokens need no code in a scheme.
"""

from __future__ import annotations

from posenc.attn.segment_sums import in_order_of_positions
from posenc.contract.operations import device, take_along_axis
from posenc.contract.protocol import Array, Namespace
from posenc.contract.tokens import Tokens


def with_earlier(
    x: Array,
    count: int,
    tokens: Tokens | None = None,
    *,
    before: Array | None = None,
    xp: Namespace,
) -> Array:
    """Hidden states of each token and of the ``count`` tokens before it in its segment.

    Parameters
    ----------
    x
        Hidden states ``(B, L, C)``.
    count
        Number of earlier tokens.
    tokens
        Positions and segments of the tokens; None if they are in order, in one segment.
    before
        Hidden states ``(B, n, C)`` of the last tokens before all of these, in order.

    Returns
    -------
    ``(B, L, count + 1, C)``: the earliest first, and the token itself last. Zeros stand for tokens
    before the first. Tokens that share a position follow each other as in memory.
    """
    batch, length, width = x.shape
    earlier = xp.zeros((batch, count, width), dtype=x.dtype, device=device(x))
    if before is not None:
        earlier = xp.concat([earlier, xp.astype(before, x.dtype)], axis=1)[:, -count:, :]
    if tokens is None:
        return _slide(xp.concat([earlier, x], axis=1), count, length, xp)
    order = in_order_of_positions(tokens, batch, xp)
    ordered = take_along_axis(x, xp.broadcast_to(order[:, :, None], x.shape), axis=1, xp=xp)
    windows = _slide(xp.concat([earlier, ordered], axis=1), count, length, xp)
    if tokens.seg is not None:
        seg = xp.broadcast_to(tokens.seg, order.shape)
        seg = take_along_axis(seg, order, axis=1, xp=xp)
        first = xp.broadcast_to(seg[:, :1], (batch, count))
        of_windows = _slide(xp.concat([first, seg], axis=1)[..., None], count, length, xp)
        windows = xp.where(of_windows == seg[:, :, None, None], windows, 0.0)
    back = xp.argsort(order, axis=1)[:, :, None, None]
    return take_along_axis(windows, xp.broadcast_to(back, windows.shape), axis=1, xp=xp)


def _slide(tokens: Array, count: int, length: int, xp: Namespace) -> Array:
    """``tokens (B, count + L, C)`` as overlapping windows ``(B, L, count + 1, C)``."""
    return xp.stack([tokens[:, n : n + length, :] for n in range(count + 1)], axis=2)
