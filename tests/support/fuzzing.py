"""Drawn calls of attention: what is static in one, what fills it, and its definition in loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import array_api_compat.numpy as xp
import numpy as np
from hypothesis import strategies as st
from subjects import normal

import posenc
from posenc import Tokens
from posenc.apply.feature_needs import summed_features
from posenc.contract.params import Features, Params
from posenc.schemes import FIRE, FoX, Kerple
from posenc.testing.attention_case import AttentionCase
from posenc.testing.examples import (
    HEAD_DIM,
    HEADS,
    HIDDEN_DIM,
    Both,
    Checkered,
    Cooled,
    Fading,
    Fence,
    Parabola,
    Sharpening,
    Silent,
    Stretching,
    Tide,
)
from posenc.testing.framework import readonly

# By heads and channels, whatever they are; then those that speak of four heads.
ANY_SIZE = {
    "nope": lambda h, d: posenc.NoPE(),
    "alibi": lambda h, d: posenc.ALiBi(h),
    "alibi-learned": lambda h, d: posenc.ALiBi(h, learned=True),
    "alibi-geometric": lambda h, d: posenc.ALiBi(h, slopes="geometric"),
    "alibi-given": lambda h, d: posenc.ALiBi(h, slopes=[0.0, 1.0, -0.5, 3.0, 0.25, 0.5][:h]),
    "rope": lambda h, d: posenc.RoPE(d),
    "rope-base": lambda h, d: posenc.RoPE(d, base=100.0),
    "rope-interleaved": lambda h, d: posenc.RoPE(d, layout="interleaved"),
    "rope-partial": lambda h, d: posenc.RoPE(d, rotary_dim=2),
    "t5": lambda h, d: posenc.T5Bias(h),
    "t5-causal": lambda h, d: posenc.T5Bias(h, causal=True),
    "t5-few": lambda h, d: posenc.T5Bias(h, num_buckets=8, max_distance=20),
    "t5-unscaled": lambda h, d: posenc.T5Bias(h, scaled=False),
    "kerple_log": lambda h, d: Kerple(h),
    "kerple_power": lambda h, d: Kerple(h, kind="power"),
    "fire": lambda h, d: FIRE(h, hidden=3),
    "alibi-offset": lambda h, d: posenc.ALiBi(h, noncausal="offset"),
    "alibi-two-sided": lambda h, d: posenc.ALiBi(h, noncausal="two_sided"),
    "fox": lambda h, d: FoX(h, HIDDEN_DIM),
    "fading": lambda h, d: Fading(h),
    "cooled": lambda h, d: Cooled(),
    "stretching": lambda h, d: Stretching(d).at_length(64),
    "parabola": lambda h, d: Parabola(),
    "tide": lambda h, d: Tide((0.25, 0.5, 1.0, -2.0, 0.125, 4.0)[:h]),
    "silent": lambda h, d: Silent(),
}
FOUR_HEADS = {
    "fence": lambda h, d: Fence(),
    "fence-wide": lambda h, d: Fence(reach=9),
    "sharpening": lambda h, d: Sharpening(),
    "checkered": lambda h, d: Checkered(),
    "both": lambda h, d: Both(d),
}
KINDS = ANY_SIZE | FOUR_HEADS
MAX_POSITION = {"tide": 2**29}  # its bias is of i + j, which must fit 32 bits as differences do
POSITIONS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
BASES = (0, 0, 0, 7, -20, 200, 2**15, 2**20, -(2**20), 2**24 + 1, 2**30 - 20, 2**30, -(2**30))


@dataclass(frozen=True)
class Layout:
    """What is static in a call: JAX compiles once for all that ``fill`` makes of one layout.

    ``pos`` and ``seg`` are the axes of the arrays, ``""`` for none; ``exists``, ``pos_dtypes`` and
    ``seg_dtypes`` are of queries and of keys. With ``shared`` the queries are the last of the keys'
    tokens.
    """

    kind: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    dim: int
    v_dim: int
    pos: str = ""
    pos_dtypes: tuple[str, str] = ("int64", "int64")
    seg: str = ""
    seg_dtypes: tuple[str, str] = ("int64", "int64")
    exists: tuple[str, str] = ("", "")
    shared: bool = False
    ready: bool = False  # features are given
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def scheme(self):
        return KINDS[self.kind](self.heads, self.dim)


@dataclass(frozen=True)
class Filling:
    """What the arrays of a layout hold."""

    seed: int
    bases: tuple[int, ...]  # every token stands near one of them
    spread: int  # how far from it at most; 0 repeats one position
    ordered: bool
    factor: int  # of learned arrays
    seg_base: int


@dataclass(frozen=True)
class Mixed(AttentionCase):
    """A problem whose tensors differ in dtype: ``dtypes`` by name; q has the one asked for."""

    dtypes: Mapping[str, str] = field(default_factory=dict)

    def _cast(self, dtype: str) -> dict[str, str]:
        return {**super()._cast(dtype), **self.dtypes}


@st.composite
def layouts(draw, sizes=None, kinds=tuple(KINDS), longest=40):
    """Any layout; or one of ``sizes``, that are ``(B, H, Hk, Q, K, D, Dv)``."""
    kind = draw(st.sampled_from(kinds))
    if sizes is None:
        heads = HEADS if kind in FOUR_HEADS else draw(st.integers(1, 6))
        q_len = draw(st.integers(1, longest))
        size = {
            "batch": draw(st.integers(1, 3)),
            "heads": heads,
            "kv_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
            "q_len": q_len,
            "k_len": draw(st.just(q_len) | st.integers(1, longest)),
            "dim": 2 * draw(st.integers(1, 8)),
            "v_dim": draw(st.integers(1, 16)),
        }
    else:
        names = ("batch", "heads", "kv_heads", "q_len", "k_len", "dim", "v_dim")
        size = dict(zip(names, draw(st.sampled_from(sizes)), strict=True))
    longer = max(size["q_len"], size["k_len"])
    windows = (
        st.none()
        | st.sampled_from([1, 2, 4, (1, 0), (0, 3)])  # narrow enough to hide something
        | st.integers(1, longer + 5)
        | st.sampled_from([2**31 - 1, 2**40])
        | st.tuples(*[st.none() | st.integers(0, longer + 5)] * 2)
    )
    with_first = st.builds(posenc.window, windows, first=st.sampled_from([0, 2, 9]))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | windows),
        "mask": draw(st.none() | with_first),
        "scale": draw(st.sampled_from([None, None, 0.5, 1, 0.0, -0.25])),
        "k_transformed": draw(st.sampled_from([False, False, True])),
    }
    given = ("L", "1L", "BL")  # the default aligns ends, which needs as many keys as queries
    pos = draw(st.sampled_from(given if size["q_len"] > size["k_len"] else ("", "", *given)))
    integers, maybe = st.sampled_from(POSITIONS), st.sampled_from(("", "", *given))
    ready = bool(summed_features(KINDS[kind](HEADS, HEAD_DIM))) and draw(st.booleans())
    return Layout(
        kind=kind,
        **size,
        pos=pos,
        pos_dtypes=(draw(integers), draw(integers)) if pos else ("int64", "int64"),
        seg=(seg := draw(maybe)),
        seg_dtypes=(draw(integers), draw(integers)) if seg else ("int64", "int64"),
        exists=(draw(maybe), draw(maybe)) if draw(st.booleans()) else ("", ""),
        shared=not ready and size["q_len"] <= size["k_len"] and draw(st.booleans()),
        ready=ready,
        options=tuple(sorted(options.items())),
    )


fillings = st.builds(
    Filling,
    seed=st.integers(0, 2**16),
    bases=st.lists(st.sampled_from(BASES), min_size=1, max_size=2).map(tuple),
    spread=st.sampled_from([0, 3, 20, 40, 150, 2**12]),
    ordered=st.booleans(),
    factor=st.sampled_from([1, 1, 4]),
    seg_base=st.sampled_from([0, -1, 2**31 - 4, -(2**31)]),
)


def fill(layout: Layout, filling: Filling) -> AttentionCase:
    """The call with its arrays."""
    scheme, seed = layout.scheme, filling.seed
    B, Q, K = layout.batch, layout.q_len, layout.k_len
    tensors = {
        "q": normal((B, layout.heads, Q, layout.dim), seed),
        "k": normal((B, layout.kv_heads, K, layout.dim), seed + 1),
        "v": normal((B, layout.kv_heads, K, layout.v_dim), seed + 2),
    }
    keys, queries = {}, {}
    if layout.ready:
        queries["features"] = {"c": normal((B, layout.heads, Q), seed + 3)}
        # Between those of queries: at equal ones a bias of their distance has no derivative, and
        # libraries choose differently.
        between = np.clip(normal((B, layout.heads, K), seed + 4), -3, 3) + 1 / 64
        keys["features"] = {"c": readonly(between)}
    elif summed_features(scheme):
        keys["x"] = normal((B, K, HIDDEN_DIM), seed + 3)
    params = {
        name: readonly((filling.factor * a).astype("float32"))
        for name, a in posenc.init_params(scheme, seed).items()
    }
    options = {n: o for n, o in layout.options if o is not None}
    rng = np.random.default_rng(seed + 5)
    if layout.pos:
        queries["pos"], keys["pos"] = _positions(layout, filling, rng)
    if layout.seg:
        queries["seg"], keys["seg"] = _segments(layout, filling, rng)
    for side, axes, length in zip((queries, keys), layout.exists, (Q, K), strict=True):
        if axes:
            side["exists"] = readonly(rng.random(_shape(layout, axes, length)) < 0.75)
    if keys:
        options["tokens"] = Tokens(**keys)
    if not layout.shared and (keys or queries):
        options["queries"] = Tokens(**queries)
    return AttentionCase(scheme, tensors, params, options)


def _shape(layout: Layout, axes: str, length: int) -> tuple[int, ...]:
    return {"L": (length,), "1L": (1, length), "BL": (layout.batch, length)}[axes]


def _positions(layout: Layout, filling: Filling, rng):
    """Of queries and of keys: near the bases, in one order or another, within the dtype."""
    farthest = MAX_POSITION.get(layout.kind, 2**30)
    for length, dtype in zip((layout.q_len, layout.k_len), layout.pos_dtypes, strict=True):
        shape, limits = _shape(layout, layout.pos, length), np.iinfo(dtype)
        pos = rng.choice(filling.bases, shape) + rng.integers(0, filling.spread + 1, shape)
        pos = np.clip(pos, max(limits.min, -farthest), min(limits.max, farthest - 1))
        yield readonly((np.sort(pos, axis=-1) if filling.ordered else pos).astype(dtype))


def _segments(layout: Layout, filling: Filling, rng):
    """Of queries four and of keys three, so that some queries see nothing."""
    limits = [np.iinfo(dtype) for dtype in layout.seg_dtypes]
    low, high = max(i.min for i in limits), min(i.max for i in limits)
    low = max(low, -(2**31) + 2) if any(layout.exists) else low  # two numbers are of padding
    base = min(max(filling.seg_base, low), high - 3)
    for count, length, dtype in zip(
        (4, 3), (layout.q_len, layout.k_len), layout.seg_dtypes, strict=True
    ):
        shape = _shape(layout, layout.seg, length)
        yield readonly((base + rng.integers(0, count, shape)).astype(dtype))


def loops(problem: AttentionCase) -> np.ndarray:
    """The definition, one query of one head at a time, from the scheme's own methods."""
    scheme, o, t = problem.scheme, dict(problem.options), problem.tensors
    (B, H, Q, D), (_, Hk, K, _) = t["q"].shape, t["k"].shape
    query, key = _sides(problem)
    scale = o.get("scale", scheme.scale(D))
    out = np.zeros((B, H, Q, t["v"].shape[3]))
    for b, h in np.ndindex(B, H):
        params, g = _of_head(problem, h), h // (H // Hk)
        places = {"params": params, "xp": xp}
        at = [np.asarray(t["q"][b, h]), np.asarray(t["k"][b, g])]
        q = scheme.transform(at[0], query.pos[b], role="query", **places)
        transformed = o.get("k_transformed", False)
        k = at[1] if transformed else scheme.transform(at[1], key.pos[b], role="key", **places)
        bias = _bias(problem, b, h, query, key)
        for i in range(Q):
            seen = [j for j in range(K) if sees(query.at(b, i), key.at(b, j), o)]
            scores = [q[i] @ k[j] * scale + bias(i, j) for j in seen]
            if max(scores, default=-np.inf) > -np.inf:
                weights = np.exp(np.asarray(scores) - max(scores))
                out[b, h, i] = weights @ t["v"][b, g, seen] / np.sum(weights)
    return out


class Side(NamedTuple):
    """Positions, segments and which tokens exist, ``(B, L)``; or those of one token."""

    pos: Any
    seg: Any
    exists: Any

    def at(self, b: int, n: int) -> Side:
        return Side(*(int(each[b, n]) for each in self))


def _sides(problem: AttentionCase) -> tuple[Side, Side]:
    """Of queries and of keys."""
    (B, _, Q, _), K = problem.tensors["q"].shape, problem.tensors["k"].shape[2]

    def side(tokens, pos):
        given = (tokens.pos, tokens.seg, tokens.exists)
        each = (d if a is None else a for a, d in zip(given, (pos, 0, True), strict=True))
        return Side(*(np.broadcast_to(np.asarray(a).astype(int), (B, len(pos))) for a in each))

    key = side(problem.options.get("tokens", Tokens()), np.arange(K))
    if "queries" not in problem.options:  # they are the last of these tokens
        return Side(*(each[:, K - Q :] for each in key)), key
    return side(problem.options["queries"], np.arange(K - Q, K)), key


def sees(query: Side, key: Side, o: Mapping[str, Any]) -> bool:
    """Whether a query sees a key: both exist in a segment, in its past, and inside both windows."""
    if not query.exists or not key.exists or query.seg != key.seg:
        return False
    if o.get("causal", False) and key.pos > query.pos:
        return False
    mask = o.get("mask") or posenc.Mask()
    window = o.get("window")
    if isinstance(window, int):
        window = (window - 1, window - 1)
    return _inside(query.pos, key.pos, window, 0) and _inside(
        query.pos, key.pos, (mask.left, mask.right), mask.first_tokens
    )


def _inside(q_pos: int, k_pos: int, window: tuple[int | None, int | None] | None, first: int):
    """Whether a key is in a query's window, or among its first tokens."""
    left, right = window or (None, None)
    if 0 <= k_pos < first:
        return True
    ahead = k_pos - q_pos
    return (left is None or ahead >= -left) and (right is None or ahead <= right)


def _bias(problem: AttentionCase, b, h, query: Side, key: Side):
    """The bias of one head as a function of a query's and a key's number in memory."""
    scheme, own = problem.scheme, _of_head(problem, h)
    if not summed_features(scheme):
        places = {"params": own, "xp": xp}
        return lambda i, j: scheme.bias(query.pos[b][i], key.pos[b][j], **places) or 0.0
    q, k = _sums(problem, b, h, *(Side(*(each[b] for each in side)) for side in (query, key)))

    def bias(i, j):
        sides = Features({"c": q[i]}, "query"), Features({"c": k[j]}, "key")
        read = Params(dict(own), xp.float64, *sides)
        return scheme.bias(query.pos[b][i], key.pos[b][j], params=read, xp=xp)

    return bias


def _of_head(problem: AttentionCase, head: int) -> Params:
    specs = problem.scheme.param_specs()
    own = {
        name: np.asarray(a, "float64")[head] if specs[name].per_head else np.asarray(a, "float64")
        for name, a in problem.params.items()
    }
    fixed = {n: np.asarray(a[head]) for n, a in problem.scheme.constants().items()}
    return Params({n: np.asarray(a) for n, a in own.items()} | fixed, xp.float64)


def _sums(problem: AttentionCase, b, h, query: Side, key: Side):
    """Of queries and keys of one head: gates of all keys of one's segment up to one's position."""
    tokens = problem.options["tokens"]
    if tokens.features is not None:
        return problem.options["queries"].features["c"][b, h], tokens.features["c"][b, h]
    w, bias = (problem.params[n].astype("float64")[h] for n in "wb")
    gates = [-np.log1p(np.exp(-(x @ w + bias))) for x in tokens.x[b]]

    def summed(side):
        return np.asarray(
            [
                sum(
                    gate
                    for gate, at, own, exists in zip(gates, *key, strict=True)
                    if exists and at <= p and own == s
                )
                for p, s, _ in zip(*side, strict=True)
            ]
        )

    return summed(query), summed(key)
