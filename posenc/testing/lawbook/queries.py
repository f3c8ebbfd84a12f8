"""Laws of numbers of a query, a sink and a factor of the bias: each query has its own."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from posenc.apply.shapes import as_column
from posenc.contract.params import head_views, tile_views
from posenc.contract.protocol import Hook
from posenc.testing.framework import Host
from posenc.testing.law import law, require_equal
from posenc.testing.places import first_index, of_tokens
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tokens import RoleTokens

_HOOKS = (Hook.SINK, Hook.BIAS_FACTOR)
_LENGTHS = (1, 6, 70, 20_011)  # the last: longer than most training contexts
_BATCH = 5
_DENSE = 5000


@law("scheme")
def sink_and_bias_factor_are_query_local(case: SchemeCase) -> None:
    """A sink, and a factor of the bias, depend on their own query only, and are finite.

    The factor is positive.
    """
    rng = np.random.default_rng(25)
    for hook in _HOOKS:
        if hook not in case.scheme.hooks():
            continue
        for length in _LENGTHS:
            q = case.draw_tokens(rng, "query", length)
            whole, some = _numbers(case, hook, q), rng.permutation(length)[:4]
            if whole is None:
                break
            _require_legal(hook, whole, q)
            alone, where = _numbers(case, hook, q.take(some)), of_tokens("query", q.pos[some])
            what = f"{hook} of {some.size} of {length} queries"
            require_equal(alone, whole[:, :, some], what, where)
        else:
            _require_independent_sequences(case, hook, case.draw_tokens(rng, "query", (_BATCH, 6)))
            every = case.tokens(_every_size(case), "query")
            for dtype in ("float32", "float64"):
                _require_legal(hook, _numbers(case, hook, every, dtype), every)


def _require_independent_sequences(case: SchemeCase, hook: Hook, q: RoleTokens) -> None:
    """Raise unless each sequence of a batch has its own numbers."""
    whole: Any = _numbers(case, hook, q)
    for own in (0, _BATCH - 1):
        alone, where = _numbers(case, hook, q.row(own)), of_tokens("query", q.pos[own])
        what = f"{hook} of sequence {own} of {_BATCH} alone"
        require_equal(alone, whole[own : own + 1], what, where)


def _require_legal(hook: Hook, numbers: Any, q: RoleTokens) -> None:
    """Raise unless all numbers are finite, and those of a factor positive."""
    legal = np.isfinite(numbers) & ((numbers > 0) | (hook == Hook.SINK))
    if not np.all(legal):
        at = first_index(~legal)
        kind = "finite" if hook == Hook.SINK else "positive and finite"
        where = of_tokens("query", q.pos)(at)
        raise AssertionError(f"{hook}: {numbers[at]}, expected a {kind} number at {where}")


def _every_size(case: SchemeCase) -> Host:
    """Every position up to some thousands, and further ones of every size."""
    low, high = case.positions
    powers = 2 ** np.arange(12, 30)
    sizes = np.concatenate([np.arange(_DENSE), *(powers + by for by in (-1, 0, 1))])
    at = np.concatenate([sizes, -sizes, [low, high]])
    return np.unique(at[(at >= low) & (at <= high)])


def sink_moves(case: SchemeCase, pos: Host, by: int) -> bool:
    """Whether a sink is another where all positions are moved."""
    if Hook.SINK not in case.scheme.hooks():
        return False
    q = case.tokens(pos, "query")
    here, there = _numbers(case, Hook.SINK, q), _numbers(case, Hook.SINK, q.shift(by))
    return here is not None and not np.array_equal(here, np.asarray(there))


def _numbers(case: SchemeCase, hook: Hook, q: RoleTokens, dtype: str = "float32") -> Host | None:
    """What a hook returns for queries, ``(B, H, Q)``; None if it returns None."""
    arrays = case.whole_params(dtype)
    query = tile_views(q.bias_reads(arrays.dtype), "query", xp=xp)
    views = head_views(case.scheme, dict(arrays), dtype=arrays.dtype, xp=xp, query=query)
    numbers: Any = getattr(case.scheme, hook)(as_column(q.pos), params=views, xp=xp)
    if numbers is None:
        return None
    batch = len(q.pos) if q.pos.ndim == 2 else 1
    shape = (batch, case.heads, q.size, 1)
    return np.asarray(np.broadcast_to(np.asarray(numbers), shape))[..., 0]
