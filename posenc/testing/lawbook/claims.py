"""Laws of claims: what a scheme says of its bias is true, and what it does not say is not so.

A claim that is missing costs a lowering and no more; it is a law all the same, because a reader of
the catalogue takes silence for "no".
"""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np

import posenc
from posenc.testing.framework import Host
from posenc.testing.law import law, require
from posenc.testing.subject import Subject
from posenc.testing.tolerances import SEPARATED

_TRIALS = 12
_NEAR = 41


@law("scheme")
def relative_is_as_claimed(subject: Subject) -> None:
    """``relative``: the bias does not change when every position does; without it, it does."""
    claimed, rng, moved = subject.scheme.relative, np.random.default_rng(2), False
    if subject.gated:
        return
    if not subject.biased:
        require(not claimed, "claimed, though there is no bias")
        return
    low, high = subject.reach
    for by in (1, 7, 64, 2**10, 2**20):
        if high - low <= 2 * by:
            break
        for _ in range(_TRIALS):
            q, k = (subject.positions(rng).clip(low, high - by) for _ in range(2))
            changed = not np.array_equal(
                np.asarray(subject.tile(q, k)), np.asarray(subject.tile(q + by, k + by))
            )
            moved |= changed
            require(not (claimed and changed), f"claimed, but q {q}, k {k} moved by {by} differ")
    require(claimed or moved, "not claimed, though nothing moved the bias")


@law("scheme")
def key_bias_is_as_claimed(subject: Subject) -> None:
    """``key_bias``: up to the query the bias is ``u(q) + key_bias(k)``; without it, it is not."""
    if not subject.biased:
        return
    q, k, left = _left(subject)
    claimed, separable = False, True
    for head in range(subject.heads):
        bias, own = _head(subject, q, k, head), _own(subject, k, head)
        claimed = own is not None
        constant = not np.any(bias[left] != bias[left][0])
        require(
            claimed or not constant,
            f"head {head}: constant up to the query. Do first values say nothing? Give params=",
        )
        spread = _spread(bias, own, left)
        largest = np.max(np.abs(bias), where=np.isfinite(bias) & left, initial=1)
        separable &= spread <= SEPARATED * largest
        require(
            separable or not claimed,
            f"head {head}: bias - key_bias varies by {spread:.2e} over the keys of one query",
        )
    require(
        claimed or not separable,
        "not claimed, though the bias is u(q) + w(k): write key_bias, which returns w(k)",
    )


def _spread(bias: Host, of_key: Host | None, left: Host) -> float:
    """By how much ``bias - of_key`` varies over the keys of one query, at most.

    Without ``of_key`` the bias of the query before stands for it, over what both see.
    """
    found = 0.0
    for at in range(len(bias)) if of_key is not None else range(1, len(bias)):
        other = bias[at - 1] if of_key is None else of_key
        seen = left[at] if of_key is not None else left[at] & left[at - 1]
        here, there = bias[at][seen], other[seen]
        finite = np.isfinite(here)
        if np.any(finite != np.isfinite(there)):
            return float("inf")
        if np.any(finite):
            found = max(found, float(np.ptp(here[finite] - there[finite])))
    return found


def _left(subject: Subject) -> tuple[Host, Host, Host]:
    """Queries, keys, and which keys are not after a query ``(Q, K)``.

    Coordinates ``(H, L)`` for a scheme with gates.
    """
    if subject.gated:
        x = subject.normal((1, 12, subject.width), 5)
        found = posenc.coordinates(subject.scheme, x, subject.params)
        assert found is not None
        at = np.asarray([7, 9, 11])
        return found[0][:, at], found[0], np.arange(12) <= at[:, None]
    low, high = subject.reach
    ends = [high // 2, high] if high < _NEAR else [_NEAR, 55, 600, 5000, 2**20]
    q = np.unique([min(end, high) for end in ends])
    near = [p - back for p in q for back in (0, 1, 2, 5, 9, 33)]
    keys = [*near, 0, 1, 2, *range(-900, 0, 111), -(2**20)]
    k = np.unique(np.clip(keys, low, high))
    return q, k, k <= q[:, None]


def _head(subject: Subject, q: Host, k: Host, head: int) -> Host:
    """The bias of one head in float64, ``(Q, K)``."""
    q, k = (q[head], k[head]) if q.ndim == 2 else (q, k)
    dense = subject.tile(q, k, "float64")
    assert dense is not None
    own: Host = dense[head]
    return own


def _own(subject: Subject, k: Host, head: int) -> Host | None:
    """The key bias of one head in float64, ``(K,)``."""
    keys, params = (k[head] if k.ndim == 2 else k), subject.of_head(head, "float64")
    found = subject.scheme.key_bias(keys, params=params, xp=xp)
    return None if found is None else np.broadcast_to(np.asarray(found), keys.shape)
