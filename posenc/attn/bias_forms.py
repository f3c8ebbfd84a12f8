"""Two cheaper forms of a bias, ``O(H L)`` numbers each: by distance, and by key.

A kernel that reads one of them does not compute the bias. A ``relative`` scheme has a form by
distance. A scheme with ``key_bias`` has a form by key.
"""

from __future__ import annotations

from array_api_compat import device

from posenc.attn.call import Call
from posenc.evaluate import as_row, bias_tile, has_bias, reads_features
from posenc.positions import visible
from posenc.protocol import Array, Namespace


def bias_by_distance(call: Call) -> Array | None:
    """The bias at each of ``distances``, ``(H or 1, Q + K - 1)``.

    None unless the scheme is relative, positions are the default, and the caller adds no bias.
    Distances that a causal mask or a window hides are included.
    """
    scheme, xp = call.scheme, call.xp
    if not has_bias_by_distance(call):
        return None
    at = distances(call)[None, None, None, :]
    tile = bias_tile(scheme, xp.zeros_like(at), at, call.arrays, dtype=call.dtype, xp=xp)
    return None if tile is None else xp.reshape(_broadcast(tile, at, xp), (-1, at.shape[-1]))


def has_bias_by_distance(call: Call) -> bool:
    """Whether ``bias_by_distance`` may return an array: the bias depends on distance only."""
    scheme = call.scheme
    declared = scheme.relative and has_bias(scheme) and not reads_features(scheme)
    return declared and call.in_order and call.extra_bias is None


def distances(call: Call) -> Array:
    """All values of ``k_pos - q_pos`` at default positions: ``1 - K .. Q - 1``."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    steps = call.xp.arange(q_len + k_len - 1, dtype=call.key.pos.dtype, device=device(call.key.pos))
    return steps - (k_len - 1)


def visible_by_distance(call: Call) -> Array:
    """Whether a key at each of ``distances`` is visible under the causal mask and the window."""
    at, xp = distances(call), call.xp
    mask = visible(xp.zeros_like(at), at, causal=call.causal, window=call.window)
    return xp.ones_like(at, dtype=xp.bool) if mask is None else mask


def bias_by_key(call: Call) -> Array | None:
    """``w(k)`` of every key, ``(B or 1, H or 1, K)``, if the bias is ``u(q) + w(k)``.

    None unless the call is causal and the scheme has a ``key_bias``. None too if the caller gives
    places (``q_axes``): then a visible key may have a later place than the query.
    """
    if not has_bias_by_key(call):
        return None
    at = as_row(call.key.pos)
    bias = call.scheme.key_bias(at, params=call.views(), xp=call.xp)
    return None if bias is None else _broadcast(bias, at, call.xp)[..., 0, :]


def has_bias_by_key(call: Call) -> bool:
    """Whether ``bias_by_key`` may return an array."""
    declared = {"bias", "key_bias"} <= call.scheme.hooks()
    return declared and call.causal and call.query.places is None and call.extra_bias is None


def _broadcast(bias: Array, at: Array, xp: Namespace) -> Array:
    """A bias with all axes of the positions ``at``; a constant bias may lack some."""
    return bias + xp.zeros(at.shape, dtype=bias.dtype, device=device(at))
