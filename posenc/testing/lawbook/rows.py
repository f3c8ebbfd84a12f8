"""Laws of scores that are no product: decays of channels add up along the way.

Rows that ``adjust_scores`` changes belong to one query and the keys that it sees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import posenc
from posenc.contract.protocol import Hook
from posenc.contract.tokens import Tokens
from posenc.testing.framework import Host
from posenc.testing.law import law, require
from posenc.testing.places import of_tokens
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

_LENGTH, _CHANGED = 16, 3
# Sequences, and keys of a row: a batch larger than most, a row longer than a block.
_SIZES = ((3, 40), (5, 24), (1, 600))
_OWN = 12  # keys of the queries' own document
_OFFSETS = (0, 4099, 1, 70_001, 3)  # where the document of each sequence begins
_QUERIES = 90  # more than a block
_UNIT = 1e-9  # of a decay in float64: sums of some 16 gates
# Scores up to 10 in float64; a scheme may solve for rows of 600.
_TOLERANCE = ATTENTION_TOL["float32"]


@law("scheme")
def adjusted_rows_read_what_they_see(case: SchemeCase) -> None:
    """Changed keys that a query does not see, and other queries, leave its row as it is."""
    if Hook.ADJUST_SCORES not in case.scheme.hooks():
        return
    pos, tensors = np.arange(_LENGTH), case.tensors(_LENGTH)
    ahead = pos[None, :] - pos[:, None]
    some, valid = ahead % 3 == 0, np.ones((2, _LENGTH), bool)
    valid[:, _CHANGED] = False
    seg = pos // 5
    masks: dict[str, tuple[dict[str, Any], Host]] = {
        "causal": ({"causal": True}, ahead <= 0),
        "a window": ({"window": (4, 2)}, (ahead >= -4) & (ahead <= 2)),
        "a causal window": ({"causal": True, "window": 5}, (ahead > -5) & (ahead <= 0)),
        "a mask": ({"mask": some[None, None]}, some),
        "segments": ({"tokens": Tokens(seg=seg)}, seg[:, None] == seg[None, :]),
        "padding": (
            {"tokens": Tokens(exists=valid), "queries": Tokens()},
            np.broadcast_to(valid[0], some.shape),
        ),
    }
    for name, (options, seen) in masks.items():
        before = _attend(case, tensors, options)
        for changed, unseen in (
            (("k", "v"), np.flatnonzero(~seen[:, _CHANGED])),
            (("q",), np.flatnonzero(pos != _CHANGED)),
        ):
            other = {n: np.array(a) for n, a in tensors.items()}
            for array in changed:
                other[array][:, :, _CHANGED] += 2
            after = _attend(case, other, options)
            side = "key" if "k" in changed else "query"
            what = f"{name}, with another {side} at position {_CHANGED}"
            rows = of_tokens("query", unseen)
            assert_near(after[:, :, unseen], before[:, :, unseen], _TOLERANCE, what, where=rows)


@law("scheme")
def adjusted_rows_may_be_long(case: SchemeCase) -> None:
    """Scores among many queries, keys and sequences are those of the query's document alone."""
    if Hook.ADJUST_SCORES not in case.scheme.hooks():
        return
    rng = np.random.default_rng(27)
    for batch, length in _SIZES:
        tensors = case.tensors(3, length, batch=batch)
        own = np.sort(rng.permutation(length)[:_OWN])
        pos, seg = rng.integers(0, _LENGTH, (batch, length)), np.zeros((batch, length), int)
        furthest = case.positions[1] + 1 - _OWN
        first = np.minimum(_OFFSETS[:batch], furthest)[:, None]
        pos[:, own], seg[:, own] = first + np.arange(_OWN), 1
        asked = own[-3:]
        tokens = Tokens(pos, seg)
        queries = Tokens(pos[:, asked], seg[:, asked], x=tensors["x"][:, asked])
        where = {"tokens": tokens, "queries": queries}
        whole = _attend(case, tensors, {"causal": True, **where})
        for row in range(batch):
            alone = {n: a[row : row + 1] for n, a in tensors.items()}
            alone |= {n: alone[n][:, :, own] for n in "kv"} | {"x": alone["x"][:, own]}
            there = {
                "tokens": Tokens(pos[row, own]),
                "queries": Tokens(pos[row, asked], x=queries.x[row : row + 1]),
            }
            expected = _attend(case, alone, {"causal": True, **there})
            what = f"sequence {row} of {batch}, {_OWN} of {length} keys"
            at = of_tokens("query", pos[row : row + 1, asked])
            require(np.all(np.isfinite(expected)), f"not finite at positions {pos[row, asked]}")
            assert_near(whole[row : row + 1], expected, _TOLERANCE, what, where=at)
    tensors = case.tensors(_QUERIES, batch=1)
    whole = _attend(case, tensors, {"causal": True})[:, :, -2:]
    last = _attend(case, {**tensors, "q": tensors["q"][:, :, -2:]}, {"causal": True})
    what, at = f"2 of {_QUERIES} queries", of_tokens("query", np.arange(_QUERIES)[-2:])
    assert_near(last, whole, _TOLERANCE, what, where=at)


@law("scheme")
def channel_decay_adds_up(case: SchemeCase) -> None:
    """From a key to a query it is that to a token between plus the rest; finite, and 0 at most."""
    if Hook.CHANNEL_DECAY not in case.scheme.hooks():
        return
    rng, (low, high) = np.random.default_rng(31), case.positions
    near = np.arange(_LENGTH) + max(low, 0)
    for pos in (near, np.sort(rng.integers(low, high + 1, _LENGTH))):
        call = case.call(case.tensors(_LENGTH), causal=True, tokens=Tokens(pos)).prepared()
        decay = np.asarray(call.channel_decay().pairs())  # (B, H, Q, K, D or 1)
        require(bool(np.all(np.isfinite(decay))), f"not finite at positions {pos}")
        for i, a, j in _ordered(_LENGTH):
            whole, parts = decay[:, :, i, j], decay[:, :, i, a] + decay[:, :, a, j]
            where = f"of query {pos[i]} and key {pos[j]}"
            require(bool(np.all(whole <= _UNIT)), f"above 0 {where}: {whole.max():.9g}")
            off = np.abs(whole - parts) / np.maximum(np.abs(whole), 1)
            worst = np.argmax(off)
            require(
                bool(np.all(off < _UNIT)),
                f"{where}: {whole.ravel()[worst]:.9g}, and by the token at {pos[a]} "
                f"{parts.ravel()[worst]:.9g}",
            )


def _ordered(length: int) -> list[tuple[int, int, int]]:
    """Some triples of a query, a token between and a key, with equal ones among them."""
    every = range(0, length, 3)
    return [(i, a, j) for i in every for a in every for j in every if j <= a <= i]


def _attend(case: SchemeCase, tensors: Any, options: dict[str, Any]) -> Host:
    """Attention of the reference in float64."""
    given = {**tensors, **options, "implementation": "reference"}
    given["tokens"] = replace(given.get("tokens") or Tokens(), x=given.pop("x"))
    return np.asarray(posenc.attention(**given, scheme=case.scheme, params=case.params))
