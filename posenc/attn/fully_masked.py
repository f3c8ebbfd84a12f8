"""Queries that see no key, and keys that no query sees, are set to 0.

Padding may hold NaN or infinity. A weight of 0 does not keep NaN out: 0 times NaN is NaN, in
results and, through scores, in gradients.
"""

from __future__ import annotations

from posenc.attn.call import Call
from posenc.contract.protocol import Array, Namespace


def may_be_fully_masked(call: Call) -> bool:
    """Whether the call may have a query that sees no key, or a key that no query sees.

    It may if positions, segments or a mask are given. A window at default positions may hide keys
    from all of fewer queries, but these are tokens, not padding: to set them to 0 would read a
    cache twice.
    """
    return call.query.seg is not None or not call.aligned or not call.mask.plain


def zero_fully_masked(
    q: Array, k: Array, v: Array, visible: Array, *, xp: Namespace
) -> tuple[Array, Array, Array]:
    """q, k and v with 0 for queries that see no key, and for keys that no query sees.

    ``visible`` is ``(B or 1, H or 1, Q, K)``; the others are ``(B, H, L, D)``.
    """
    return zero_unless(q, k, v, *not_fully_masked(visible, xp=xp), xp=xp)


def not_fully_masked(visible: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """Which queries see a key, ``(B or 1, Q)``, and which keys a query sees, ``(B or 1, K)``."""
    return xp.any(visible, axis=(1, 3)), xp.any(visible, axis=(1, 2))


def zero_unless(
    q: Array, k: Array, v: Array, queries: Array, keys: Array, *, xp: Namespace
) -> tuple[Array, Array, Array]:
    """Set q to 0 where ``queries (B or 1, Q)`` is False, k and v where ``keys (B or 1, K)`` is."""
    queries, keys = queries[:, None, :, None], keys[:, None, :, None]
    return xp.where(queries, q, 0.0), xp.where(keys, k, 0.0), xp.where(keys, v, 0.0)
