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


@law("scheme")
def relative_is_as_claimed(subject: Subject) -> None:
    """``relative``: the bias does not change when every position does; without it, it does."""
    if subject.gated or not subject.biased:
        return
    claimed, rng, moved = subject.scheme.relative, np.random.default_rng(2), False
    low, high = subject.reach
    for by in (1, 7, 64, 2**10, 2**20)[: 5 if high - low > 2**20 else 3]:
        for _ in range(_TRIALS):
            q, k = (
                p.clip(low, high - by) for p in (subject.positions(rng), subject.positions(rng))
            )
            changed = not np.array_equal(
                np.asarray(subject.tile(q, k)), np.asarray(subject.tile(q + by, k + by))
            )
            moved |= changed
            require(not (claimed and changed), f"claimed, but q {q}, k {k} moved by {by} differ")
    require(claimed or moved, "not claimed, though nothing moved the bias")


@law("scheme")
def key_bias_is_as_claimed(subject: Subject) -> None:
    """``key_bias``: to the left of a query the bias is ``u(q) + key_bias(k)``; else it is not."""
    if not subject.biased:
        return
    q, k = _left(subject)
    claimed, separable = False, True
    for head in range(subject.heads):
        bias, own = _head(subject, q, k, head), _own(subject, k, head)
        claimed = own is not None
        spread = _spread(bias, bias[:1] if own is None else own)
        separable &= spread <= SEPARATED * np.max(np.abs(bias), where=np.isfinite(bias), initial=1)
        require(
            separable or not claimed,
            f"head {head}: bias - key_bias varies by {spread:.2e} over the keys of one query",
        )
    require(claimed or not separable, "not claimed, though the bias is u(q) + w(k)")


def _spread(bias: Host, of_key: Host) -> float:
    """By how much ``bias - of_key`` varies along keys; infinite if they hide different ones."""
    hidden = ~np.isfinite(bias) | ~np.isfinite(of_key)
    if np.any(hidden != hidden[:1]):
        return float("inf")
    rest = (bias - of_key)[:, ~hidden[0]]
    return float(np.max(np.ptp(rest, axis=1))) if rest.size else 0.0


def _left(subject: Subject) -> tuple[Host, Host]:
    """Two queries, and keys that both may see; coordinates ``(H, L)`` for a scheme with gates."""
    if not subject.gated:
        low, high = subject.reach
        keys = np.asarray([0, 1, 2, 5, 9, 20, 33, 40, *range(-900, 0, 111), low + 3])
        keys = np.unique(keys.clip(low, high))
        return np.asarray([min(high, 41), min(high, 55)]), keys
    x = subject.normal((1, 12, subject.width), 5)
    found = posenc.coordinates(subject.scheme, x, subject.params)
    assert found is not None
    return found[0, :, 10:], found[0, :, :10]


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
