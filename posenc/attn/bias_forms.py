"""Two cheaper forms of one bias, ``O(H L)`` numbers each: by distance, and by key.

A kernel that reads one of them computes no bias. Which of them there is follows from what a scheme
declares: ``relative`` and ``key_bias``.
"""

from __future__ import annotations

from array_api_compat import device

from posenc.attn.call import Call
from posenc.evaluate import as_row, bias_tile, has_bias, reads_features
from posenc.positions import visible
from posenc.protocol import Array, Namespace


def bias_by_distance(call: Call) -> Array | None:
    """The bias at every distance there is, ``(H or 1, Q + K - 1)``; see ``distances``.

    None unless the scheme is relative, positions are the default, and nothing else is added. What a
    causal mask or a window hides is in it too.
    """
    scheme, xp = call.scheme, call.xp
    if not has_bias_by_distance(call):
        return None
    at = distances(call)[None, None, None, :]
    tile = bias_tile(scheme, xp.zeros_like(at), at, call.arrays, dtype=call.dtype, xp=xp)
    return None if tile is None else xp.reshape(_wide(tile, at, xp), (-1, at.shape[-1]))


def has_bias_by_distance(call: Call) -> bool:
    """Whether the bias is a function of the distance alone, at every distance there is."""
    scheme = call.scheme
    own = scheme.relative and has_bias(scheme) and not reads_features(scheme)
    return own and call.in_order and call.extra_bias is None


def distances(call: Call) -> Array:
    """``k_pos - q_pos`` between aligned queries and keys: ``1 - K .. Q - 1``."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    steps = call.xp.arange(q_len + k_len - 1, dtype=call.key.pos.dtype, device=device(call.key.pos))
    return steps - (k_len - 1)


def visible_by_distance(call: Call) -> Array:
    """Whether the causal mask and the window let a key at each of ``distances`` be seen."""
    at, xp = distances(call), call.xp
    seen = visible(xp.zeros_like(at), at, causal=call.causal, window=call.window)
    return xp.ones_like(at, dtype=xp.bool) if seen is None else seen


def bias_by_key(call: Call) -> Array | None:
    """``w(k)`` of every key, ``(B or 1, H or 1, K)``, where the bias is ``u(q) + w(k)``.

    None unless the call is causal, the scheme has a key bias, and a bias reads positions: of places
    that are given, later ones may be visible.
    """
    if not has_bias_by_key(call):
        return None
    at = as_row(call.key.pos)
    found = call.scheme.key_bias(at, params=call.views(), xp=call.xp)
    return None if found is None else _wide(found, at, call.xp)[..., 0, :]


def has_bias_by_key(call: Call) -> bool:
    """Whether ``bias_by_key`` may have an answer."""
    own = {"bias", "key_bias"} <= call.scheme.hooks()
    return own and call.causal and call.query.places is None and call.extra_bias is None


def _wide(bias: Array, at: Array, xp: Namespace) -> Array:
    """A bias with every axis of where it is asked for: a constant one may have none."""
    return bias + xp.zeros(at.shape, dtype=bias.dtype, device=device(at))
