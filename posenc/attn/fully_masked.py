"""What nobody sees is taken for 0, so that NaN in it, or infinity, reaches nothing.

A weight of 0 does not keep NaN out: 0 times NaN is NaN, in results and, for scores, in gradients.
"""

from __future__ import annotations

from posenc.attn.call import Call
from posenc.protocol import Array, Namespace


def may_be_fully_masked(call: Call) -> bool:
    """Whether a key, or a query, may be alone: by what is given of positions, segments, a mask."""
    return call.query.seg is not None or not call.aligned or call.mask is not None


def zero_fully_masked(
    q: Array, k: Array, v: Array, seen: Array, *, xp: Namespace
) -> tuple[Array, Array, Array]:
    """q, k and v with 0 for queries that see no key, and for keys that no query sees.

    ``seen`` is ``(B or 1, H or 1, Q, K)``; the others ``(B, H, L, D)``.
    """
    return zero_unless(q, k, v, *not_fully_masked(seen, xp=xp), xp=xp)


def not_fully_masked(seen: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """Which queries see a key ``(B or 1, Q)``, and which keys a query sees ``(B or 1, K)``."""
    return xp.any(seen, axis=(1, 3)), xp.any(seen, axis=(1, 2))


def zero_unless(
    q: Array, k: Array, v: Array, queries: Array, keys: Array, *, xp: Namespace
) -> tuple[Array, Array, Array]:
    """0 where ``queries`` and ``keys`` are False."""
    queries, keys = queries[:, None, :, None], keys[:, None, :, None]
    return xp.where(queries, q, 0.0), xp.where(keys, k, 0.0), xp.where(keys, v, 0.0)
