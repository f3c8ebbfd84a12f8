"""Tokens that no segment lets anybody see are set to 0 before learned arrays read them.

The gradient of a learned array is a sum over tokens. That of padding is 0 times what the padding
holds, and 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from posenc.apply.feature_needs import reads_vectors
from posenc.apply.shapes import common_size
from posenc.contract.operations import cumulative_sum, take_along_axis
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme
from posenc.contract.tokens import Tokens


def _reads_vectors(scheme: PositionScheme) -> bool:
    """Whether learned arrays of a scheme may meet vectors of queries or keys."""
    learned = Hook.TRANSFORM in scheme.hooks() or reads_vectors(scheme, "query")
    return learned or reads_vectors(scheme, "key")


def zero_padding(
    q: Array,
    k: Array,
    query: Tokens,
    key: Tokens,
    scheme: PositionScheme,
    xp: Namespace,
    gather: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """Q and k ``(B, H, L, D)`` with 0 for tokens in a segment that the other side does not have.

    Unchanged if the scheme has no learned arrays, or reads no vectors. If q and k are one part of a
    sequence, ``gather`` gives the segments ``(B, n)`` of all parts from those of this one.
    """
    if query.seg is None or not scheme.param_specs() or not _reads_vectors(scheme):
        return q, k
    assert key.seg is not None
    q_seg, k_seg = _rows(query.seg), _rows(key.seg)
    if q_seg.shape[0] != k_seg.shape[0]:  # one of them is the same for the whole batch
        batch = common_size(q_seg.shape[0], k_seg.shape[0])
        q_seg, k_seg = (xp.broadcast_to(s, (batch, s.shape[1])) for s in (q_seg, k_seg))
    all_q, all_k = (q_seg, k_seg) if gather is None else (gather(q_seg), gather(k_seg))
    of_queries, of_keys = occurs_in(q_seg, all_k, xp), occurs_in(k_seg, all_q, xp)
    return (
        xp.where(of_queries[:, None, :, None], q, 0.0),
        xp.where(of_keys[:, None, :, None], k, 0.0),
    )


def occurs_in(numbers: Array, others: Array, xp: Namespace) -> Array:
    """Which of ``numbers (B, n)`` are among ``others (B, m)`` of the same row; ``O(L log L)``."""
    count = others.shape[1]
    if count == 0:
        return xp.zeros_like(numbers, dtype=xp.bool)
    # In the order of numbers, and others first among equals: if a number is among them, it equals
    # the last one before it.
    both = xp.concat([others, numbers], axis=1)
    order = xp.argsort(both, axis=1, stable=True)
    before = cumulative_sum(xp.astype(order < count, order.dtype), axis=1, xp=xp)
    last = take_along_axis(xp.sort(others, axis=1), xp.clip(before - 1, 0), axis=1, xp=xp)
    found = (before > 0) & (last == take_along_axis(both, order, axis=1, xp=xp))
    back = xp.argsort(order, axis=1)
    return take_along_axis(found, back, axis=1, xp=xp)[:, count:]


def _rows(seg: Array) -> Array:
    """Segments with a batch axis."""
    return seg if len(seg.shape) == 2 else seg[None, :]
