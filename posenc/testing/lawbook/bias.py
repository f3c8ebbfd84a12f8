"""Laws of a bias: a pure function of one query position and one key position."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from posenc.testing.framework import Host
from posenc.testing.law import law, require, require_equal
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tokens import Tokens
from posenc.testing.tolerances import SCALAR_VS_ARRAY_TOL, assert_near

_TRIALS = 8
_BATCH = 5  # more than in any other law
# Numbers of queries and keys: a decoding step, a single key, and a rectangle. 4099 is longer than
# many training contexts, and no multiple of a block.
_LONG = ((1, 4099), (4099, 1), (70, 130))


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

            def of(i: Any, j: Any, head: int = head, q: Tokens = q, k: Tokens = k) -> Host:
                """The bias of one head for queries ``i`` and keys ``j``."""
                sides = (q.of_head(head, i, np.float32), k.of_head(head, j, np.float32))
                params = case.head_params(head, "float32", *sides)
                at = np.asarray(q.pos[i]), np.asarray(k.pos[j])
                return np.asarray(case.scheme.bias(*at, params=params, xp=xp))

            for i, j in {(0, 0), (q.size - 1, 0), (0, k.size - 1), (q.size - 1, k.size - 1)}:
                pair = f"head {head}, q {q.pos[i]}, k {k.pos[j]}"
                assert_near(of(i, j), dense[head, i, j], SCALAR_VS_ARRAY_TOL, pair)
                line = np.broadcast_to(of(i, slice(None)), k.pos.shape)
                require_equal(line, dense[head, i], f"row of {pair}")
            every = slice(None)
            block = np.broadcast_to(of((every, None), (None, every)), dense[head].shape)
            require_equal(block, dense[head], f"head {head} alone, q {q.pos}, k {k.pos}")


@law("scheme")
def tile_is_slice(case: SchemeCase) -> None:
    """The bias of some queries and keys equals that slice of the whole, bit by bit."""
    rng = np.random.default_rng(1)
    lengths = [tuple(rng.integers(1, 7, 2)) for _ in range(_TRIALS)]
    for q_len, k_len in (*lengths, *_LONG):
        q, k = case.draw_tokens(rng, "query", q_len), case.draw_tokens(rng, "key", k_len)
        dense = case.bias(q, k)
        if dense is None:
            return
        some, other = (
            rng.permutation(q_len)[:2],
            slice(int(rng.integers(k_len)), None, 1 + k_len // 6),
        )
        part = case.bias(q.take(some), k.take(other))
        what = f"q {q.pos[some]} of {q_len}, k {k.pos[other]} of {k_len}"
        require_equal(part, dense[:, some, other], what)
    _require_independent_sequences(case, rng)
    _require_slice_of_key_bias(case, rng)


def _require_independent_sequences(case: SchemeCase, rng: np.random.Generator) -> None:
    """Raise unless each sequence of a batch has the bias of its own positions."""
    q, k = case.draw_tokens(rng, "query", (_BATCH, 3)), case.draw_tokens(rng, "key", (_BATCH, 4))
    dense = case.bias(q, k)
    assert dense is not None
    for own in (0, _BATCH - 1):
        what = f"sequence {own} of {_BATCH}, q {q.pos[own]}, k {k.pos[own]}"
        require_equal(case.bias(q.row(own), k.row(own)), dense[own], what)


def _require_slice_of_key_bias(case: SchemeCase, rng: np.random.Generator) -> None:
    """Raise unless the key bias of some keys equals that slice of the whole."""
    head = case.heads - 1
    for length in (6, max(_LONG)[0]):
        k = case.draw_tokens(rng, "key", length)
        whole, some = key_bias(case, k, head), rng.permutation(length)[:4]
        if whole is None:
            return
        what = f"key_bias of head {head}, k {k.pos[some]} of {length}"
        require_equal(key_bias(case, k.take(some), head), whole[some], what)


def key_bias(case: SchemeCase, k: Tokens, head: int, dtype: str = "float32") -> Host | None:
    """The key bias of one head, ``(K,)``; None without one."""
    params = case.head_params(head, dtype, key=k.of_head(head, ..., np.dtype(dtype)))
    bias: Any = case.scheme.key_bias(k.pos, params=params, xp=xp)
    return None if bias is None else np.broadcast_to(np.asarray(bias), k.pos.shape)


@law("scheme")
def bias_is_finite_or_masks(case: SchemeCase) -> None:
    """The bias at any pair of positions is finite, or -inf, which masks the key."""
    low, high = case.positions
    ends = [low, low + 1, -1, 0, 1, 2, 7, 8, high - 1, high]
    sizes = [sign * (2**n + by) for n in range(2, 30) for by in (-1, 0, 1) for sign in (1, -1)]
    few, many = (
        [case.tokens(at, role) for role in ("query", "key")]
        for at in (np.unique([p for p in pos if low <= p <= high]) for pos in (ends, ends + sizes))
    )
    for dtype in ("float32", "float64"):
        for q, k in ((few[0], many[1]), (many[0], few[1])):
            dense = case.bias(q, k, dtype)
            if dense is None:
                return
            require(dense.dtype == dtype, f"params of {dtype} give a bias of {dense.dtype}")
            wrong = np.argwhere(~(np.isfinite(dense) | (dense == -np.inf)))
            if wrong.size:
                head, i, j = wrong[0]
                where = f"head {head}, q {q.pos[i]}, k {k.pos[j]}"
                raise AssertionError(f"{dense[head, i, j]} for {where}")
        keys = key_bias(case, many[1], 0, dtype)
        if keys is not None:
            at = many[1].pos[~np.isfinite(keys)]
            require(keys.dtype == dtype, f"params of {dtype} give a key_bias of {keys.dtype}")
            require(np.all(np.isfinite(keys)), f"key_bias: not finite at {at}")
