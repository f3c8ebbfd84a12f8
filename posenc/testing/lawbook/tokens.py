"""Laws of a transform, an embedding and features: each token is computed by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

import posenc
from posenc.apply.feature_needs import has_features
from posenc.apply.transform import has_transform
from posenc.contract.protocol import Hook, Role
from posenc.contract.tokens import Tokens
from posenc.testing.framework import Host, readonly
from posenc.testing.law import law, require, require_equal
from posenc.testing.places import of_tokens
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tokens import RoleTokens
from posenc.testing.tolerances import FLOAT32_TOL, VALUE_TOL, assert_near

_TRIALS = 4
_BATCH = 5
_LONG = 20_011  # longer than most training contexts, and no multiple of a block
_LONG_OF_WIDE = 130
_CONTEXT = 2**17
_DENSE = 1000
_NUDGE = 2.0**-40
_ROLES: tuple[Role, Role] = ("query", "key")


def _vectors(case: SchemeCase, length: int, dtype: str = "float32", batch: int = 2) -> Host:
    shape = (batch, case.heads, length, case.head_dim)
    return readonly(case.normal(shape, 1).astype(dtype))


@law("scheme")
def transform_is_row_local(case: SchemeCase) -> None:
    """The transform of a query or key depends on its own position only, not on other tokens.

    It may add channels, as many for queries as for keys.
    """
    if not has_transform(case.scheme):
        return
    for each in (case, *case.with_wider_heads()):
        _require_row_local(each, (_LONG if each is case else _LONG_OF_WIDE,))


def _require_row_local(case: SchemeCase, long: tuple[int, ...]) -> None:
    """Raise unless every token is transformed alone, in sequences of a few tokens and ``long``."""
    rng, channels = np.random.default_rng(3), set[int]()
    for role in _ROLES:
        for length in (*rng.integers(1, 12, _TRIALS), *long):
            tokens = case.draw_tokens(rng, role, int(length))
            x, order = _vectors(case, tokens.size, batch=1), rng.permutation(tokens.size)[:4]
            whole = case.transform(x, tokens)
            kept = whole.shape[:-1] == x.shape[:-1] and whole.shape[-1] >= x.shape[-1]
            require(kept, f"{role}: {x.shape} becomes {whole.shape}")
            channels.add(whole.shape[-1])
            part, where = tokens.take(order), of_tokens(role, tokens.pos[order])
            what = f"{order.size} of {length} tokens, head_dim {case.head_dim}"
            require_equal(case.transform(x[:, :, order], part), whole[:, :, order], what, where)
        _require_independent_in_a_batch(case, rng, role)
    require(len(channels) == 1, f"queries and keys have different channels: {sorted(channels)}")


def _require_independent_in_a_batch(case: SchemeCase, rng: np.random.Generator, role: Role) -> None:
    """Raise unless sequences of a batch, and heads, are transformed independently."""
    tokens, x = case.draw_tokens(rng, role, (_BATCH, 6)), _vectors(case, 6, batch=_BATCH)
    whole, other = case.transform(x, tokens), np.array(x)
    for own in (0, _BATCH - 1):
        alone = case.transform(x[own : own + 1], tokens.row(own))
        what, where = f"sequence {own} of {_BATCH} alone", of_tokens(role, tokens.pos[own])
        require_equal(whole[own : own + 1], alone, what, where)
    other[:, 0] += 1
    changed = case.transform(other, tokens)
    where = of_tokens(role, tokens.pos)
    require_equal(changed[:, 1:], whole[:, 1:], "other heads than the changed one", where)
    if role == "key" and case.shares_keys:
        alone = case.transform(x[:, :1], tokens)
        require_equal(alone, whole[:, :1], "one head alone", where)


@law("scheme")
def rotary_made_before_changes_nothing(case: SchemeCase) -> None:
    """With ``posenc.rotary`` of the same positions, results have the same bits as without.

    It depends only on the learned arrays that ``rotary_params`` names.
    """
    rng = np.random.default_rng(23)
    params = {name: a + 1 for name, a in case.params.items()}
    params |= {name: case.params[name] for name in case.scheme.rotary_params()}
    for size in (7, (_BATCH, 6)):
        q, k = (case.draw_tokens(rng, role, size) for role in _ROLES)
        for tokens, dtype in itertools.product((q, k), ("float16", "float32", "float64")):
            made = _rotary(case, tokens, params, dtype)
            if made is None:
                require(Hook.ROTARY not in case.scheme.hooks(), "posenc.rotary gives None")
                return
            x, what = _vectors(case, q.size, dtype, batch=_BATCH), f"{tokens.role} of {dtype}"
            with np.errstate(over="ignore"):  # to infinity, as rounding to float16 does
                whole = case.transform(x, tokens)
                require_equal(case.transform(x, tokens, rotary=made), whole, what)
    hidden = case.normal((_BATCH, q.size, case.hidden_dim), 3)
    hidden_states = hidden if case.reads_hidden else None
    sides = {
        name: Tokens(side.pos, places=side.places, x=hidden_states)
        for name, side in (("queries", q), ("tokens", k))
    }
    options: Any = {"scheme": case.scheme, "params": case.params, **sides}
    options |= dict.fromkeys("qkv", _vectors(case, q.size, "float64", batch=_BATCH))
    both = {
        name: replace(sides[name], rotary=_rotary(case, side, params, "float64"))
        for name, side in (("queries", q), ("tokens", k))
    }
    whole = posenc.attention(**options)
    require_equal(posenc.attention(**{**options, **both}), whole, "attention")


def _rotary(case: SchemeCase, tokens: RoleTokens, params: Mapping[str, Host], dtype: str) -> Any:
    """``posenc.rotary`` at the positions of tokens."""
    own = replace(tokens.tokens, features=None)
    return posenc.rotary(case.scheme, own, params, dtype=np.dtype(dtype))


@law("scheme")
def half_precision_rounds_once(case: SchemeCase) -> None:
    """A transform or embedding in half precision equals the one in float32, rounded once."""
    for each in case.with_wider_heads():
        _require_one_rounding(each)
    pos = _require_one_rounding(case)
    wide = posenc.embedding(case.scheme, pos, case.params)
    if wide is not None:
        narrow = posenc.embedding(case.scheme, pos, case.params, dtype=np.float16)
        require_equal(narrow, wide.astype(np.float16), f"embedding, pos {pos}")


def _require_one_rounding(case: SchemeCase) -> Host:
    """Raise unless a transform in half precision rounds once; returns the positions tried."""
    pos = case.draw_positions(np.random.default_rng(4), 8)
    half = _vectors(case, 8, "float16")
    for role in _ROLES:
        tokens = case.tokens(pos, role)
        expected = case.transform(readonly(half.astype(np.float32)), tokens)
        with np.errstate(over="ignore"):  # to infinity, as rounding does
            actual, expected = case.transform(half, tokens), expected.astype(np.float16)
        require(actual.dtype == np.float16, f"{role} of float16 becomes {actual.dtype}")
        require_equal(actual, expected, f"head_dim {case.head_dim}", of_tokens(role, pos))
    return pos


@law("scheme")
def tokens_far_away_are_finite(case: SchemeCase) -> None:
    """A transform and an embedding are finite at every position that the scheme accepts."""
    low, high = case.positions
    near = np.arange(max(low, -_DENSE), min(high, _DENSE) + 1)
    pos = np.asarray([low, high, 0, *near])
    for each in (case, *case.with_wider_heads()):
        at = pos if each is case else pos[:3]
        for role in _ROLES:
            x = _vectors(each, at.size, batch=1)
            turned = each.transform(x, each.tokens(at, role))
            wrong = at[~np.isfinite(turned).all(axis=(0, 1, 3))]
            require(not wrong.size, f"{role} is not finite at pos {wrong[:3]}")
    rows = posenc.embedding(case.scheme, pos, case.params)
    if rows is not None:
        wrong = pos[~np.isfinite(rows).all(axis=-1)]
        require(not wrong.size, f"embedding is not finite at pos {wrong[:3]}")


@law("scheme")
def embedding_is_one_row_per_position(case: SchemeCase) -> None:
    """The embedding of a position is the same row, wherever it is in the sequence."""
    high = min(case.positions[1], 9)
    pos = np.asarray([[high, 0, 1], [1, 2, 2]])
    rows = posenc.embedding(case.scheme, pos, case.params)
    if rows is None:
        return
    require(rows.ndim == 3 and rows.shape[:2] == pos.shape, f"{pos.shape} gives {rows.shape}")
    require(rows.dtype == np.float32, f"float32 params give {rows.dtype}")
    rng = np.random.default_rng(14)
    for many in (pos, case.draw_positions(rng, (_BATCH, 3)), case.draw_positions(rng, _LONG)):
        rows = np.asarray(posenc.embedding(case.scheme, many, case.params))
        for place in list(np.ndindex(many.shape))[:: max(1, many.size // 9)]:
            alone = posenc.embedding(case.scheme, many[place][None], case.params)
            what = f"pos {many[place]} at {place} of {many.shape}"
            require_equal(rows[place], np.asarray(alone)[0], what)


@law("scheme")
def features_are_row_local(case: SchemeCase) -> None:
    """A feature depends only on its own token's hidden state or vector, and is finite."""
    sizes = [(case, _BATCH, 9), (case, 1, _LONG)]
    for each, batch, length in (*sizes, *((wide, 1, 9) for wide in case.with_wider_heads())):
        for name in each.scheme.feature_specs():
            given = _feature_input(each, name, batch, length)
            whole = _feature(each, name, given, length)
            large = _feature(each, name, readonly(100 * given), length)
            what, shape = f"feature {name!r}", whole.shape
            accepted = (batch, each.heads, length)
            fits = whole.ndim in (3, 4) and all(
                have in (1, want) if axis < 2 else have == want
                for axis, (have, want) in enumerate(zip(shape[:3], accepted, strict=True))
            )
            require(fits, f"{what} has shape {shape}, not (B, H, L) = {accepted} or one more")
            require(np.all(np.isfinite(whole)), f"{what} is not finite")
            require(np.all(np.isfinite(large)), f"{what}, of large numbers, is not finite")
            _require_token_local(each, name, given, whole)


def _require_token_local(case: SchemeCase, name: str, given: Host, whole: Host) -> None:
    """Raise if a changed token changes features of others, or a slice has other features."""
    length, what = given.shape[-2], f"feature {name!r}"
    row, at = len(given) - 1, length // 2
    changed = np.array(given)
    changed[row, ..., at, :] += 1
    own, others = np.array(_feature(case, name, changed, length)), np.array(whole)
    own[row % len(own), :, at] = others[row % len(own), :, at] = 0
    require_equal(own, others, f"{what}, of {given.shape}, with another token changed")
    # Not bit by bit: matrices of other shapes may be multiplied in another order.
    some = slice(at - 1, at + 3)
    alone = _feature(case, name, readonly(given[row:, ..., some, :]), length, some)
    where = f"tokens {some.start} to {some.stop - 1} of {length}, alone"
    expected = whole[row:, :, some] if len(whole) > 1 else whole[:, :, some]
    assert_near(alone, expected, VALUE_TOL["float32"], f"{what}, {where}")


def _feature(
    case: SchemeCase, name: str, given: Host, length: int, some: slice = slice(None)
) -> Host:
    """A feature of ``some`` of ``length`` tokens with these hidden states or vectors."""
    spec, params = case.scheme.feature_specs()[name], case.whole_params()
    if spec.reads == "hidden":
        if spec.lookback:  # a token with those before it
            given = given.reshape(*given.shape[:2], -1, case.hidden_dim)
        return np.asarray(spec.compute(given, params=params, xp=xp))
    at = max(case.positions[0], -8) + np.arange(length) % 20
    if case.scheme.axes > 1:
        at = np.stack([np.roll(at, n) for n in range(case.scheme.axes)], axis=-1)
    return np.asarray(spec.compute(given, at[some], scale=0.5, params=params, xp=xp))


def _feature_input(case: SchemeCase, name: str, batch: int, length: int) -> Host:
    """The input of a feature: hidden states or vectors."""
    spec = case.scheme.feature_specs()[name]
    if spec.reads == "vectors":
        return _vectors(case, length, batch=batch)
    width = (1 + spec.lookback) * case.hidden_dim
    return readonly(case.normal((batch, length, width), 2).astype(np.float32))


@law("scheme")
def features_follow_their_tokens(case: SchemeCase) -> None:
    """Features and cumulative features do not depend on the order of tokens in memory."""
    if not has_features(case.scheme):
        return
    rng, length = np.random.default_rng(15), 12
    low, high = max(-20, case.positions[0]), min(40, case.positions[1])
    pos = np.stack([rng.permutation(np.arange(low, high + 1))[:length] for _ in range(2)])
    seg = np.broadcast_to(np.arange(length) % 3, pos.shape)
    order, batch = rng.permutation(length), 2
    given: Any = {
        "q": case.normal((batch, case.heads, length, case.head_dim), 17),
        "k": case.normal((batch, case.heads, length, case.head_dim), 18),
    }
    shuffled: Any = {name: a[..., order, :] for name, a in given.items()}
    scheme, params = case.scheme, case.params
    x = case.normal((batch, length, case.hidden_dim), 16)
    wheres = {"pos": Tokens(pos, x=x), "pos and seg": Tokens(pos, seg, x=x)}
    for where, tokens in wheres.items():
        there = tokens.map(lambda a: a[:, order])
        both = (
            posenc.features(scheme, params, tokens, **given),
            posenc.features(scheme, params, there, **shuffled),
        )
        whole, again = ([side.features or {} for side in sides] for sides in both)
        for role, one, other in zip(_ROLES, whole, again, strict=True):
            require(one.keys() == other.keys(), f"{role}: {list(one)}, then {list(other)}")
            for name, array in one.items():
                what = f"{name} of the {role}, {where}"
                assert_near(other[name], array[:, :, order], VALUE_TOL["float64"], what)


@law("scheme")
def float32_is_float64_rounded(case: SchemeCase) -> None:
    """Bias, transform and embedding are exact to float32 rounding for 131072 tokens."""
    low, high = (int(np.clip(end, -_CONTEXT, _CONTEXT)) for end in case.positions)
    rng = np.random.default_rng(12)
    pos = np.concatenate([[low, high, high - 1], rng.integers(low, high, 5), rng.integers(0, 9, 4)])
    vectors = case.normal((1, case.heads, pos.size, case.head_dim), 13)
    wide = _widened(case)
    for role in _ROLES:
        tokens = case.tokens(pos, role)

        def turned(times: float, tokens: RoleTokens = tokens) -> Host:
            return wide.transform(times * vectors, tokens)

        narrow = case.transform(readonly(vectors.astype(np.float32)), tokens)
        _require_rounded(narrow, turned(1), f"{role}, pos {pos}", mixed=True)
        _require_float64(turned, f"{role}, pos {pos}")
    if case.params and posenc.embedding(case.scheme, pos, case.params) is not None:

        def embedded(times: float) -> Host:  # without params it is float32 in any case
            params = _widened(case, times).params
            return np.asarray(posenc.embedding(case.scheme, pos, params))

        rows = posenc.embedding(case.scheme, pos, case.params)
        _require_rounded(rows, embedded(1), f"embedding, pos {pos}")
        _require_float64(embedded, f"embedding, pos {pos}")
    if case.has_bias:
        q, k = (case.tokens(pos, role) for role in _ROLES)

        def biased(times: float) -> Host:
            return np.asarray(_widened(case, times).bias(q, k, "float64"))

        _require_rounded(case.bias(q, k), biased(1), f"bias, pos {pos}")
        _require_float64(biased, f"bias, pos {pos}")


def _widened(case: SchemeCase, times: float = 1) -> SchemeCase:
    """The case with float64 params, multiplied by ``times``."""
    params = {name: np.asarray(times * a.astype(np.float64)) for name, a in case.params.items()}
    return replace(case, params=params)


def _require_float64(of: Callable[[float], Host], what: str) -> None:
    """Raise if the result ignores a change of its argument that only float64 can represent."""
    one = of(1)
    require(one.dtype == np.float64, f"{what}: float64 gives {one.dtype}")
    ignored = np.array_equal(of(1 + _NUDGE), one) and not np.array_equal(of(1.25), one)
    require(not ignored, f"{what}: computed in less than float64, which a change of 1e-12 shows")


def _require_rounded(narrow: Any, wide: Any, what: str, *, mixed: bool = False) -> None:
    """Raise unless each number is within ``FLOAT32_TOL`` of the float64 one.

    ``mixed``: relative to the largest number of its row, because a rotation mixes channels, and a
    small number may be the difference of large ones.
    """
    narrow, wide = np.asarray(narrow, np.float64), np.asarray(wide, np.float64)
    masked = wide == -np.inf
    require(
        np.array_equal(narrow == -np.inf, masked),
        f"{what}: -inf in only one of float32 and float64",
    )
    require(np.all(np.isfinite(narrow[~masked])), f"{what}: not finite")
    error = np.abs(np.subtract(narrow, wide, where=~masked, out=np.zeros_like(wide)))
    size = np.abs(np.where(masked, 0, wide))
    size = np.max(size, axis=-1, keepdims=True) if mixed else size
    allowed = np.broadcast_to(FLOAT32_TOL * np.maximum(1, size), error.shape)
    excess = np.unravel_index(np.argmax(error / allowed), error.shape)
    message = f"float32 gives {narrow[excess]:.9g}, float64 {wide[excess]:.9g}"
    require(np.all(error <= allowed), f"{what}: {message}")
