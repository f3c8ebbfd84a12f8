"""Two cheaper forms of a bias, ``O(H L)`` numbers each: by distance, and by key.

A kernel that reads one of them does not compute the bias. A ``relative`` scheme has a form by
distance. A scheme with ``key_bias`` has a form by key. A bias by distance may be constant far away
(``constant_beyond``): then a kernel needs one number per head for far tiles, and a table for near
ones.
"""

from __future__ import annotations

from posenc.apply.bias import bias_at_distances, depends_on_distance
from posenc.apply.shapes import as_row
from posenc.attn.call import Call
from posenc.contract.operations import device
from posenc.contract.protocol import Array, Hook, Namespace
from posenc.positions.integers import visible


def bias_by_distance(call: Call, *, between: tuple[int, int] | None = None) -> Array | None:
    """The bias at each of ``distances``, ``(H or 1, Q + K - 1)``.

    None unless the scheme is relative, positions are the default, and the caller adds no bias.
    Distances that a causal mask or a window hides are included. With ``between=(first, last)``: at
    ``first .. last`` instead, ``(H or 1, last - first + 1)``; distances that no pair has count as
    the nearest that one has.
    """
    scheme, xp = call.scheme, call.xp
    if not has_bias_by_distance(call):
        return None
    at = distances(call) if between is None else _distances_between(call, *between)
    return bias_at_distances(scheme, at, call.arrays, dtype=call.dtype, xp=xp)


def has_bias_by_distance(call: Call) -> bool:
    """Whether ``bias_by_distance`` may return an array: the bias depends on distance only."""
    return depends_on_distance(call.scheme) and call.in_order and call.extra_bias is None


def distances(call: Call) -> Array:
    """All values of ``k_pos - q_pos`` at default positions: ``1 - K .. Q - 1``."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    steps = call.xp.arange(q_len + k_len - 1, dtype=call.key.pos.dtype, device=device(call.key.pos))
    return steps - (k_len - 1)


def _distances_between(call: Call, first: int, last: int) -> Array:
    xp, pos = call.xp, call.key.pos
    at = xp.arange(last - first + 1, dtype=pos.dtype, device=device(pos)) + first
    # Not clip, which takes no lengths that torch's compiler leaves variable.
    zero = xp.zeros_like(at)
    return xp.minimum(xp.maximum(at, zero + 1 - call.k.shape[2]), zero + call.q.shape[2] - 1)


def near_diagonals(call: Call, block: int) -> tuple[int, int]:
    """The tiles in which a bias by distance is not constant, as a range of diagonals.

    Tiles are ``block`` queries by ``block`` keys, at default positions. Block ``a`` of queries and
    block ``b`` of keys lie on diagonal ``b - a``.

    Returns
    -------
    ``first`` and ``end``. Diagonals from ``first`` to ``end - 1`` need the bias of each distance.
    All earlier ones have the bias of the distance ``-left``, and ``end`` and later ones that of
    ``right``, where ``(left, right)`` is ``constant_beyond`` of the scheme. If the bias is constant
    on no diagonal of one side, the range reaches its end there.
    """
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    first, end = 1 - -(-q_len // block), -(-k_len // block)
    left, right = call.scheme.constant_beyond()
    ahead = k_len - q_len  # the position of the first query
    # On diagonal d, distances are from d * block - ahead - (block - 1) to as much above.
    if left is not None:
        first = max(first, (ahead - left - (block - 1)) // block + 1)
    if call.causal:
        end = min(end, (ahead + block - 1) // block + 1)  # all later pairs are masked
    elif right is not None:
        end = min(end, -(-(ahead + right + block - 1) // block))
    return first, max(end, first)


def visible_by_distance(call: Call) -> Array:
    """Whether a key at each of ``distances`` is visible under the causal mask and the window."""
    at, xp = distances(call), call.xp
    mask = visible(xp.zeros_like(at), at, causal=call.causal, window=call.window)
    return xp.ones_like(at, dtype=xp.bool) if mask is None else mask


def bias_by_key(call: Call) -> Array | None:
    """``w(k)`` of every key, ``(B or 1, H or 1, K)``, if the bias is ``u(q) + w(k)``.

    None unless the call is causal and the scheme has a ``key_bias``. None too if the caller gives
    places: then a visible key may have a later place than the query.
    """
    if not has_bias_by_key(call):
        return None
    at = as_row(call.key.pos)
    bias = call.scheme.key_bias(at, params=call.views(), xp=call.xp)
    return None if bias is None else _broadcast(bias, at, call.xp)[..., 0, :]


def has_bias_by_key(call: Call) -> bool:
    """Whether ``bias_by_key`` may return an array."""
    declared = {Hook.BIAS, Hook.KEY_BIAS} <= call.scheme.hooks()
    return declared and call.causal and call.query.places is None and call.extra_bias is None


def _broadcast(bias: Array, at: Array, xp: Namespace) -> Array:
    """A bias with all axes of the positions ``at``; a constant bias may lack some."""
    return bias + xp.zeros(at.shape, dtype=bias.dtype, device=device(at))
