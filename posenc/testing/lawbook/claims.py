"""Laws of claims: what a scheme says of its bias is true, and what it does not say is not so.

A claim that is missing costs a lowering and no more; it is a law all the same, because a reader of
the catalogue takes silence for "no".
"""

from __future__ import annotations

import numpy as np

from posenc.evaluate import reads_features
from posenc.testing.framework import Host
from posenc.testing.law import law, require
from posenc.testing.lawbook.bias import key_bias
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tokens import Tokens
from posenc.testing.tolerances import KEY_BIAS_TOL

_TRIALS, _EACH = 3, 20
# Near, into any context, and to where float32 no longer holds every integer.
_SHIFTS = (1, 7, 64, 2**10, 2**20, 2**24 + 1, 2**29 - 1)
_NEAR = 41


@law("scheme")
def relative_is_as_claimed(case: SchemeCase) -> None:
    """``relative``: the bias does not change when every position does; without it, it does."""
    claimed, rng, moved = case.scheme.relative, np.random.default_rng(2), False
    if not case.has_bias:
        require(not claimed, "claimed, though there is no bias")
        return
    low, high = case.positions
    for by in _SHIFTS:
        if high - low <= 2 * by:
            break
        for _ in range(_TRIALS):
            at = [case.draw_positions(rng, _EACH).clip(low, high - by) for _ in range(2)]
            q, k = case.tokens(at[0], "query"), case.tokens(at[1], "key")
            before, after = (np.asarray(case.bias(q.moved(to), k.moved(to))) for to in (0, by))
            changed = before != after
            moved |= bool(np.any(changed))
            if claimed and np.any(changed):
                head, i, j = np.argwhere(changed)[0]
                was, becomes = before[head, i, j], after[head, i, j]
                raise AssertionError(
                    f"claimed, but the bias of head {head} at q {at[0][i]}, k {at[1][j]} is "
                    f"{was:.9g}, and {becomes:.9g} where both are moved by {by}"
                )
    # Nothing is lost by silence where features decide: no table holds them by distance.
    silent = reads_features(case.scheme)
    require(claimed or moved or silent, "not claimed, though nothing moved the bias")


@law("scheme")
def key_bias_is_as_claimed(case: SchemeCase) -> None:
    """``key_bias``: up to the query the bias is ``u(q) + key_bias(k)``; without it, it is not."""
    if not case.has_bias:
        return
    q, k, left = _left(case)
    claimed, separable = False, True
    dense = np.asarray(case.bias(q, k, "float64"))
    for head in range(case.heads):
        bias, own = dense[head], key_bias(case, k, head, "float64")
        claimed = own is not None
        constant = not np.any(bias[left] != bias[left][0])
        require(
            claimed or not constant,
            f"head {head}: constant up to the query. Do first values say nothing? Give params=",
        )
        apart = _apart(bias, own, left)
        separable &= apart is None
        require(separable or not claimed, f"head {head}: {_told(q, k, apart)}")
    require(
        claimed or not separable,
        "not claimed, though the bias is u(q) + w(k): write key_bias, which returns w(k)",
    )


def _apart(bias: Host, of_key: Host | None, left: Host) -> tuple[int, int, int, float] | None:
    """Where ``bias - of_key`` is not the same at two keys of one query: the query, both keys, and
    by how much; None if it is the same everywhere.

    Without ``of_key`` the bias of the query before stands for it, over what both see.
    """
    for at in range(len(bias)) if of_key is not None else range(1, len(bias)):
        other = bias[at - 1] if of_key is None else of_key
        seen = np.flatnonzero(left[at] if of_key is not None else left[at] & left[at - 1])
        here, there = bias[at][seen], other[seen]
        finite = np.isfinite(here)
        if np.any(finite != np.isfinite(there)):
            wrong = int(np.argmax(finite != np.isfinite(there)))
            return at, int(seen[wrong]), int(seen[wrong]), float("inf")
        if not np.any(finite):
            continue
        seen, here, there = seen[finite], here[finite], there[finite]
        # What is near is computed from small numbers: its rounding is small too.
        size = np.maximum(np.abs(here), np.abs(there))
        first = int(np.argmin(size))
        off = np.abs((here - there) - (here[first] - there[first]))
        worst = int(np.argmax(off / np.maximum(1, size)))
        if off[worst] > KEY_BIAS_TOL * max(1.0, size[worst]):
            return at, int(seen[first]), int(seen[worst]), float(off[worst])
    return None


def _told(q: Tokens, k: Tokens, apart: tuple[int, int, int, float] | None) -> str:
    """Where a key bias is untrue, in words."""
    if apart is None:
        return "true"
    at, first, second, by = apart
    return (
        f"bias - key_bias at query {q.pos[at]} is another at key {k.pos[second]} "
        f"than at key {k.pos[first]}, by {by:.2e}"
    )


def _left(case: SchemeCase) -> tuple[Tokens, Tokens, Host]:
    """Queries, keys, and which keys are not after a query ``(Q, K)``.

    A sequence in order, and its own tokens, where features are read.
    """
    if reads_features(case.scheme):
        at, later = np.arange(12), np.asarray([7, 9, 11])
        q, k = case.tokens(at, "query").of(later), case.tokens(at, "key")
        return q, k, at <= later[:, None]
    low, high = case.positions
    ends = [high // 2, high] if high < _NEAR else [_NEAR, 55, 600, 5000, 2**20]
    q_pos = np.unique([min(end, high) for end in ends])
    # Every order of distance, as far as positions go.
    back = [0, 1, 2, 5, 9, 33, *(int(2 ** (n / 2)) for n in range(2, 60))]
    keys = [*(p - b for p in q_pos for b in back if p - b >= low), 0, 1, 2, *range(-900, 0, 111)]
    k_pos = np.unique(np.clip(keys, low, high))
    tokens = case.tokens(q_pos, "query"), case.tokens(k_pos, "key")
    return *tokens, k_pos <= q_pos[:, None]
