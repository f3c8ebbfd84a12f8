"""Laws of regions: schemes for different distances, whose results are merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import posenc
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc.contract.params import head_count
from posenc.contract.protocol import PositionScheme, Window
from posenc.contract.tokens import Tokens
from posenc.positions.integers import visible
from posenc.testing.framework import Host
from posenc.testing.law import law
from posenc.testing.places import first_index, of_pairs, of_tokens
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

_DENSE = 4200  # all distances up to here
_DRAWN = 500  # further distances, of every size
_MOST = 2**30  # the largest distance of a window's end that is probed


def _part_of(case: SchemeCase, part: PositionScheme) -> SchemeCase:
    """The case of a region's scheme, with the params that it declares."""
    own = {name: a for name, a in case.params.items() if name in part.param_specs()}
    return replace(case, scheme=part, params=own, variants=())


@law("scheme")
def each_pair_is_in_one_region(case: SchemeCase) -> None:
    """Every pair of positions is in one region, where its key counts once, or the bias masks it."""
    if not case.scheme.regions():
        return
    rng, (low, high) = np.random.default_rng(26), case.positions
    queries = np.concatenate([[0, min(_DENSE, high)], case.draw_positions(rng, 4)])
    distances = _distances(case.scheme, rng)
    for q in queries:
        q_pos, at = np.asarray([q]), q + distances
        k_pos = np.unique(at[(at >= low) & (at <= high)])
        count = _count(case, q_pos, k_pos)
        if np.any(count > 1):
            where = of_pairs(q_pos, k_pos)(first_index(count > 1))
            raise AssertionError(f"in {np.max(count)} regions: {where}")
        left_out = count == 0
        if np.any(left_out) and (bias := case.bias(q_pos, k_pos)) is not None:
            left_out = left_out & ~np.isneginf(bias)
        if np.any(left_out):
            where = of_pairs(q_pos, k_pos)(first_index(left_out))
            raise AssertionError(f"in no region, and not masked by the bias: {where}")


def _distances(scheme: PositionScheme, rng: np.random.Generator) -> Host:
    """All distances up to some thousands, those around the ends of windows, and of every size."""
    ends = np.asarray(sorted(_ends(scheme)), np.int64)
    powers = 2 ** np.arange(12, 31)
    drawn = np.exp2(rng.uniform(12, 30, _DRAWN)).astype(np.int64)
    around = np.concatenate([np.concatenate([ends, powers]) + by for by in (-2, -1, 0, 1, 2)])
    one_side = np.concatenate([np.arange(_DENSE), around, drawn])
    return np.unique(np.concatenate([one_side, -one_side]))


def _ends(scheme: PositionScheme) -> set[int]:
    """Where windows of regions end, of regions of regions too."""
    found = set[int]()
    for part, window in scheme.regions():
        found |= {abs(end) for end in window if end is not None and abs(end) <= _MOST} | _ends(part)
    return found


def _count(case: SchemeCase, q_pos: Host, k_pos: Host) -> Host:
    """In how many regions each pair is, ``(H, Q, K)``; regions of regions count one by one."""
    count = np.zeros((case.heads, q_pos.size, k_pos.size), int)
    for part, window in case.scheme.regions():
        inside = visible(q_pos[:, None], k_pos[None, :], window=window)
        seen = np.ones_like(count) if inside is None else np.asarray(inside).astype(int)
        own = _part_of(case, part)
        if part.regions():
            held = _count(own, q_pos, k_pos)
        else:
            bias = own.bias(q_pos, k_pos)
            held = np.asarray(1) if bias is None else ~np.isneginf(bias)
        count = count + seen * (held if head_count(part) or held.ndim == 0 else held[:1])
    return count


@law("scheme")
def regions_are_merged(case: SchemeCase) -> None:
    """Attention is that of every region alone, merged by the log-sum-exp of each."""
    regions = case.scheme.regions()
    if not regions:
        return
    pos = _across(case)
    for causal in (True, False):
        given: Any = {**_tensors(case, pos), "causal": causal}
        alone = [_alone(case, part, window, pos, causal) for part, window in regions]
        sink = prepare(
            given["q"], given["k"], given["v"], case.scheme, case.params, causal,
            Arguments(tokens=given["tokens"]),
        ).sink  # fmt: skip
        logs = [log for _, log in alone]
        logs += [] if sink is None else [np.broadcast_to(sink, logs[0].shape)]
        total = np.logaddexp.reduce(logs)
        merged = sum(np.exp(log - total)[..., None] * out for out, log in alone)
        whole = posenc.attention(**given, scheme=case.scheme, params=case.params)
        what, where = "causal" if causal else "without a mask", of_tokens("query", pos)
        assert_near(whole, merged, ATTENTION_TOL["float32"], what, where=where)


def _tensors(case: SchemeCase, pos: Host) -> dict[str, Any]:
    """Vectors, and the tokens at some positions with their hidden states."""
    tensors: dict[str, Any] = case.tensors(pos.size)
    tokens = Tokens(pos, x=tensors.pop("x"))
    return {**tensors, "tokens": tokens}


def _alone(
    case: SchemeCase, part: PositionScheme, window: Window, pos: Host, causal: bool
) -> tuple[Host, Host]:
    """Attention and log-sum-exp of the scheme of a region, with its window as a mask."""
    own = _part_of(case, part)
    given: Any = {**_tensors(own, pos), "causal": causal}
    seen = visible(pos[:, None], pos[None, :], window=window)
    result: tuple[Host, Host] = posenc.attention(
        **given, scheme=part, params=own.params, scale=case.scheme.scale(case.head_dim),
        mask=None if seen is None else np.asarray(seen)[None, None], return_lse=True,
    )  # fmt: skip
    return result


def _across(case: SchemeCase) -> Host:
    """Positions from 0 on and on both sides of the ends of windows, as far as the scheme goes."""
    near, high = np.arange(8), case.positions[1]
    ends = [end for end in sorted(_ends(case.scheme)) if end <= high][:6]
    around = [end + by for end in ends for by in (-1, 0, 1, 5)]
    at = np.unique([*near, *around])
    return at[(at >= 0) & (at <= high)]
