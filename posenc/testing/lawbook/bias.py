"""Laws of a bias: a pure function of one query position and one key position."""

from __future__ import annotations

from functools import partial
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from posenc.apply.feature_needs import reads_features
from posenc.testing.framework import Host
from posenc.testing.law import law, require, require_equal
from posenc.testing.places import Index, Where, first_index, of_pairs
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tokens import RoleTokens
from posenc.testing.tolerances import SCALAR_VS_ARRAY_TOL, assert_near

_TRIALS = 8
_BATCH = 5  # more than in any other law
# Numbers of queries and keys: a decoding step, a single key, and a rectangle. 20011 is longer than
# most training contexts, and no multiple of a block.
_LONG = ((1, 4099), (4099, 1), (70, 130), (2, 20_011), (20_011, 2))
_LONGEST = (1, 131_101)  # where no feature has to be drawn for each token
_DENSE = 5000  # all distances up to here, which a band or every hundredth one is among


@law("scheme")
def bias_is_elementwise(case: SchemeCase) -> None:
    """The bias of a pair of positions is the same alone, in a row, and in the whole tile."""
    rng = np.random.default_rng(0)
    for trial in range(_TRIALS):
        q, k = case.draw_tokens(rng, "query"), case.draw_tokens(rng, "key")
        dense = case.bias(q, k)
        if dense is None:
            return
        for head in {trial % case.heads, case.heads - 1}:

            def of(i: Any, j: Any, head: int = head, q: RoleTokens = q, k: RoleTokens = k) -> Host:
                """The bias of one head for queries ``i`` and keys ``j``."""
                sides = (q.of_head(head, i, np.float32), k.of_head(head, j, np.float32))
                params = case.head_params(head, "float32", *sides)
                at = np.asarray(q.pos[i]), np.asarray(k.pos[j])
                return np.asarray(case.scheme.bias(*at, params=params, xp=xp))

            where, every = of_pairs(q.pos, k.pos), slice(None)
            for i, j in {(0, 0), (q.size - 1, 0), (0, k.size - 1), (q.size - 1, k.size - 1)}:
                pair = partial(_in_place, where, (head, i, j))
                expected = dense[head, i, j]
                assert_near(of(i, j), expected, SCALAR_VS_ARRAY_TOL, "a pair alone", where=pair)
                line = np.broadcast_to(of(i, every), k.pos.shape)
                pairs = partial(_in_row, where, head, i)
                require_equal(line, dense[head, i], "a row alone", pairs)
            block = np.broadcast_to(of((every, None), (None, every)), dense[head].shape)
            require_equal(block, dense[head], "a head alone", partial(_in_head, where, head))


def _in_place(where: Where, place: Index, index: Index) -> str:
    return where(place)


def _in_row(where: Where, head: int, i: int, index: Index) -> str:
    return where((head, i, *index))


def _in_head(where: Where, head: int, index: Index) -> str:
    return where((head, *index))


@law("scheme")
def tile_is_slice(case: SchemeCase) -> None:
    """The bias of some queries and keys equals that slice of the whole, bit by bit."""
    rng = np.random.default_rng(1)
    lengths = [tuple(rng.integers(1, 7, 2)) for _ in range(_TRIALS)]
    longest = () if reads_features(case.scheme) else (_LONGEST,)
    for q_len, k_len in (*lengths, *_LONG, *longest):
        q, k = case.draw_tokens(rng, "query", q_len), case.draw_tokens(rng, "key", k_len)
        dense = case.bias(q, k)
        if dense is None:
            return
        some, other = (
            rng.permutation(q_len)[:2],
            slice(int(rng.integers(k_len)), None, 1 + k_len // 6),
        )
        part = case.bias(q.take(some), k.take(other))
        what = f"{len(some)} of {q_len} queries, {np.size(k.pos[other])} of {k_len} keys"
        pairs = of_pairs(q.pos[some], k.pos[other])
        require_equal(part, dense[:, some, other], what, pairs)
    _require_independent_sequences(case, rng)
    _require_slice_of_key_bias(case, rng)


def _require_independent_sequences(case: SchemeCase, rng: np.random.Generator) -> None:
    """Raise unless each sequence of a batch has the bias of its own positions."""
    q, k = case.draw_tokens(rng, "query", (_BATCH, 3)), case.draw_tokens(rng, "key", (_BATCH, 4))
    dense = case.bias(q, k)
    assert dense is not None
    for own in (0, _BATCH - 1):
        what, pairs = f"sequence {own} of {_BATCH} alone", of_pairs(q.pos[own], k.pos[own])
        require_equal(case.bias(q.row(own), k.row(own)), dense[own], what, pairs)


def _require_slice_of_key_bias(case: SchemeCase, rng: np.random.Generator) -> None:
    """Raise unless the key bias of some keys equals that slice of the whole."""
    head = case.heads - 1
    longest = () if reads_features(case.scheme) else (_LONGEST[1],)
    for length in (6, max(_LONG)[0], *longest):
        k = case.draw_tokens(rng, "key", length)
        whole, some = key_bias(case, k, head), rng.permutation(length)[:4]
        if whole is None:
            return
        what = f"key_bias of head {head}, k {k.pos[some]} of {length}"
        require_equal(key_bias(case, k.take(some), head), whole[some], what)


def key_bias(case: SchemeCase, k: RoleTokens, head: int, dtype: str = "float32") -> Host | None:
    """The key bias of one head, ``(K,)``; None without one."""
    params = case.head_params(head, dtype, key=k.of_head(head, ..., np.dtype(dtype)))
    bias: Any = case.scheme.key_bias(k.pos, params=params, xp=xp)
    return None if bias is None else np.broadcast_to(np.asarray(bias), k.pos.shape)


@law("scheme")
def bias_is_finite_or_masks(case: SchemeCase) -> None:
    """The bias at any pair of positions is finite, or -inf, which masks the key."""
    sides = _probed(case)
    for dtype in ("float32", "float64"):
        for q, k in sides:
            dense = case.bias(q, k, dtype)
            if dense is None:
                return
            require(dense.dtype == dtype, f"params of {dtype} give a bias of {dense.dtype}")
            wrong = ~(np.isfinite(dense) | (dense == -np.inf))
            if np.any(wrong):
                at = first_index(wrong)
                where = of_pairs(q.pos, k.pos)(at)
                raise AssertionError(f"{dense[at]}, expected a finite number or -inf at {where}")
            keys = key_bias(case, k, 0, dtype)
            if keys is not None:
                nowhere = k.pos[~np.isfinite(keys)][:1]
                require(keys.dtype == dtype, f"params of {dtype} give a key_bias of {keys.dtype}")
                require(np.all(np.isfinite(keys)), f"key_bias: not finite at {nowhere}")


def _probed(case: SchemeCase) -> list[tuple[RoleTokens, RoleTokens]]:
    """Queries and keys at all sizes of distance, and at every distance up to some thousands."""
    low, high = case.positions
    ends = [low, low + 1, -1, 0, 1, 2, 7, 8, high - 1, high]
    sizes = [sign * (2**n + by) for n in range(2, 30) for by in (-1, 0, 1) for sign in (1, -1)]
    few, many = (np.unique([p for p in pos if low <= p <= high]) for pos in (ends, ends + sizes))
    one = np.asarray([min(7, high)])
    near = np.unique(np.clip(one + np.arange(-_DENSE, _DENSE + 1), low, high))
    pairs = (few, many), (many, few), (one, near), (near, one)
    return [(case.tokens(q, "query"), case.tokens(k, "key")) for q, k in pairs]
