"""What a scheme declares of its bias must hold.

Undeclared ``relative``, ``key_bias`` and ``constant_beyond`` must not.

A missing declaration only costs speed. It is a law because readers of the catalogue take a missing
declaration for "no".
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from posenc.apply.feature_needs import reads_features
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc.contract.tokens import Tokens
from posenc.testing.framework import Host
from posenc.testing.law import law, require
from posenc.testing.lawbook.bias import key_bias
from posenc.testing.places import first_index, of_pairs
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tokens import RoleTokens
from posenc.testing.tolerances import KEY_BIAS_TOL, VALUE_TOL, assert_near

_TRIALS, _EACH = 3, 20
# Near, across any context, and where float32 no longer represents every integer.
_SHIFTS = (1, 7, 64, 2**10, 2**20, 2**24 + 1, 2**29 - 1)
_SHIFTS_OF_ALL = (7, 2**20)  # by which every near distance is moved
_NEAR = 41
_DENSE = 5000  # all distances up to here, which a band or every hundredth one is among
_DRAWN = 2000  # further distances, as many from 10,000 to 20,000 as from a to two million
_FAR = 2**20  # beyond any context: a bias that is constant from here on is constant far away


@law("scheme")
def relative_is_as_claimed(case: SchemeCase) -> None:
    """``relative`` is declared if and only if shifting all positions keeps the bias."""
    claimed, rng, moved = case.scheme.relative, np.random.default_rng(2), False
    if not case.has_bias:
        require(not claimed, "claimed, though there is no bias")
        return
    low, high = case.positions
    for by in _SHIFTS:
        if high - low <= 2 * by:
            break
        drawn = [
            [case.draw_positions(rng, _EACH).clip(low, high - by) for _ in range(2)]
            for _ in range(_TRIALS)
        ]
        near = [_all_near(low, high - by)] if by in _SHIFTS_OF_ALL else []
        for at in (*drawn, *near):
            q, k = case.tokens(at[0], "query"), case.tokens(at[1], "key")
            before, after = (np.asarray(case.bias(q.shift(to), k.shift(to))) for to in (0, by))
            changed = before != after
            moved |= bool(np.any(changed))
            if claimed and np.any(changed):
                first = first_index(changed)
                raise AssertionError(
                    f"claimed, but the bias at {of_pairs(*at)(first)} is {before[first]:.9g}, "
                    f"and {after[first]:.9g} where both are moved by {by}"
                )
    # A bias that reads features cannot become a table of distances: nothing is lost undeclared.
    exempt = reads_features(case.scheme)
    require(claimed or moved or exempt, "not claimed, though nothing moved the bias")


def _all_near(low: int, high: int) -> list[Host]:
    """One query, and keys at every distance up to some thousands."""
    q = min(_NEAR, high)
    return [np.asarray([q]), np.arange(max(low, q - _DENSE), min(high, q + _DENSE) + 1)]


@law("scheme")
def constant_beyond_is_as_claimed(case: SchemeCase) -> None:
    """``constant_beyond`` is declared if and only if a relative bias is constant far away."""
    ends = case.scheme.constant_beyond()
    if not (case.has_bias and case.scheme.relative) or reads_features(case.scheme):
        require(ends == (None, None), "claimed, though the bias is no function of distance alone")
        return
    (low, high), rng = case.positions, np.random.default_rng(24)
    drawn = np.exp2(rng.uniform(np.log2(_DENSE), 30, _DRAWN)).astype(np.int64)
    powers = [2**n for n in range(7, 31)]
    for side, end in zip(("left", "right"), ends, strict=True):
        start = min(_FAR, high - low) if end is None else end
        further = np.asarray([*range(_DENSE), *powers, *drawn, high - low - start])
        at = start + np.unique(further[(further >= 0) & (start + further <= high - low)])
        # From one end of the positions, so that a key may be as far as any.
        q, k = (high, high - at) if side == "left" else (low, low + at)
        bias = np.asarray(case.bias(np.asarray([q]), k))[:, 0]
        wrong = np.argwhere((bias != bias[:, :1]) | ~np.isfinite(bias))
        if end is None:
            require(len(wrong) or at.size < 2, f"{side}: not claimed, though constant from {start}")
        elif len(wrong):
            head, n = wrong[0]
            raise AssertionError(
                f"{side}: claimed beyond {end}, but the bias of head {head} is {bias[head, 0]:.9g} "
                f"there, and {bias[head, n]:.9g} at distance {at[n]}"
            )


@law("scheme")
def key_bias_is_as_claimed(case: SchemeCase) -> None:
    """``key_bias`` is defined if and only if the causal bias is ``u(q) + key_bias(k)``."""
    if not case.has_bias:
        return
    claimed, separable = _splits(case)
    if separable and not claimed and case.params:
        # Initial values may split, as those of ``BAM``, which are ALiBi's; others need not.
        others = {name: 1.1 * array + 0.05 for name, array in case.params.items()}
        _, separable = _splits(replace(case, params=others))
    require(
        claimed or not separable,
        "not claimed, though the bias is u(q) + w(k): write key_bias, which returns w(k)",
    )


def _splits(case: SchemeCase) -> tuple[bool, bool]:
    """Whether ``key_bias`` is defined, and whether the causal bias is ``u(q) + w(k)``."""
    q, k, causal = _causal_pairs(case)
    claimed, separable = False, True
    dense = np.asarray(case.bias(q, k, "float64"))
    for head in range(case.heads):
        bias, own = dense[head], key_bias(case, k, head, "float64")
        claimed = own is not None
        constant = not np.any(bias[causal] != bias[causal][0])
        require(
            claimed or not constant,
            f"head {head}: constant up to the query. Give params= if initial values hide the bias",
        )
        mismatch = _find_mismatch(bias, own, causal)
        separable &= mismatch is None
        require(separable or not claimed, f"head {head}: {_describe(q, k, mismatch)}")
    return claimed, separable


@law("scheme")
def bias_terms_add_up(case: SchemeCase) -> None:
    """The biases of ``bias_terms`` add up to the bias."""
    if not case.has_bias or case.scheme.bias_terms() == (("", case.scheme),):
        return
    q, k, v, x = (case.tensors(_EACH)[name] for name in "qkvx")
    call = prepare(q, k, v, case.scheme, case.params, given=Arguments(tokens=Tokens(x=x)))
    biases = [bias for term in call.bias_terms() if (bias := term.bias()) is not None]
    whole = np.asarray(call.bias())
    total = np.broadcast_to(sum(biases), whole.shape)
    assert_near(total, whole, VALUE_TOL["float64"], "the sum of the biases of bias_terms")


def _find_mismatch(
    bias: Host, of_key: Host | None, causal: Host
) -> tuple[int, int, int, float] | None:
    """Indices of a query and two keys where ``bias - of_key`` differs, and by how much, or None.

    Without ``of_key``, the bias of the previous query replaces it, over the keys that both see.
    """
    for at in range(len(bias)) if of_key is not None else range(1, len(bias)):
        other = bias[at - 1] if of_key is None else of_key
        keys = np.flatnonzero(causal[at] if of_key is not None else causal[at] & causal[at - 1])
        here, there = bias[at][keys], other[keys]
        finite = np.isfinite(here)
        if np.any(finite != np.isfinite(there)):
            wrong = int(np.argmax(finite != np.isfinite(there)))
            return at, int(keys[wrong]), int(keys[wrong]), float("inf")
        if not np.any(finite):
            continue
        keys, here, there = keys[finite], here[finite], there[finite]
        # Small biases have small rounding errors: compare with the smallest.
        size = np.maximum(np.abs(here), np.abs(there))
        first = int(np.argmin(size))
        off = np.abs((here - there) - (here[first] - there[first]))
        worst = int(np.argmax(off / np.maximum(1, size)))
        if off[worst] > KEY_BIAS_TOL * max(1.0, size[worst]):
            return at, int(keys[first]), int(keys[worst]), float(off[worst])
    return None


def _describe(q: RoleTokens, k: RoleTokens, mismatch: tuple[int, int, int, float] | None) -> str:
    """A mismatch as the message of an error."""
    if mismatch is None:
        return "true"
    at, first, second, by = mismatch
    return (
        f"bias - key_bias at query {q.pos[at]} differs between key {k.pos[second]} "
        f"and key {k.pos[first]} by {by:.2e}"
    )


def _causal_pairs(case: SchemeCase) -> tuple[RoleTokens, RoleTokens, Host]:
    """Queries, keys, and a mask ``(Q, K)`` of keys not after the query.

    For a bias that reads features, both are tokens of one sequence in order.
    """
    if reads_features(case.scheme):
        at, later = np.arange(12), np.asarray([7, 9, 11])
        q, k = case.tokens(at, "query").take(later), case.tokens(at, "key")
        return q, k, at <= later[:, None]
    low, high = case.positions
    ends = [high // 2, high] if high < _NEAR else [_NEAR, 55, 600, 5000, 2**20]
    q_pos = np.unique([min(end, high) for end in ends])
    # Distances of every magnitude, up to the range of positions.
    back = [0, 1, 2, 5, 9, 33, *(int(2 ** (n / 2)) for n in range(2, 60))]
    keys = [p - b for p in q_pos for b in back if p - b >= low]
    keys += [*range(_DENSE), *range(-900, 0, 111)]
    k_pos = np.unique(np.clip(keys, low, high))
    tokens = case.tokens(q_pos, "query"), case.tokens(k_pos, "key")
    return *tokens, k_pos <= q_pos[:, None]
