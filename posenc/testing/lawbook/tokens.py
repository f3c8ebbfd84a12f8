"""Laws of a transform, an embedding and a gate: each token by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

import posenc
from posenc.evaluate import transforms
from posenc.protocol import Role
from posenc.testing.framework import Host, readonly
from posenc.testing.law import law, require, require_equal
from posenc.testing.subject import Subject
from posenc.testing.tolerances import ROUNDED, VALUES, assert_near

_TRIALS = 4
_BATCH = 5
_LONG = 4099  # beyond the lengths that most are trained at, and no multiple of a block
_CONTEXT = 2**17
_NUDGE = 2.0**-40
_ROLES: tuple[Role, Role] = ("query", "key")


def _turned(subject: Subject, x: Host, pos: Host, role: Role) -> Host:
    return np.asarray(posenc.transform(subject.scheme, x, pos, role=role, params=subject.params))


def _vectors(subject: Subject, length: int, dtype: str = "float32", batch: int = 2) -> Host:
    shape = (batch, subject.heads, length, subject.head_dim)
    return readonly(subject.normal(shape, 1).astype(dtype))


@law("scheme")
def transform_is_row_local(subject: Subject) -> None:
    """A query or key is transformed by its own position, whatever stands beside it."""
    if not transforms(subject.scheme):
        return
    rng = np.random.default_rng(3)
    for role in _ROLES:
        for length in (*rng.integers(1, 12, _TRIALS), _LONG):
            pos = subject.positions(rng, int(length))
            x, order = _vectors(subject, pos.size, batch=1), rng.permutation(pos.size)[:4]
            whole = _turned(subject, x, pos, role)
            require(whole.shape == x.shape, f"{role}: {x.shape} becomes {whole.shape}")
            part = _turned(subject, x[:, :, order], pos[order], role)
            require_equal(part, whole[:, :, order], f"{role}, pos {pos[order]} of {length}")
        _require_alone_in_a_batch(subject, rng, role)


def _require_alone_in_a_batch(subject: Subject, rng: np.random.Generator, role: Role) -> None:
    """Each sequence of a batch is transformed by its own positions, and each head by itself."""
    pos, x = subject.positions(rng, (_BATCH, 6)), _vectors(subject, 6, batch=_BATCH)
    whole, other = _turned(subject, x, pos, role), np.array(x)
    for own in (0, _BATCH - 1):
        alone = _turned(subject, x[own : own + 1], pos[own], role)
        what = f"{role}, pos {pos[own]} of sequence {own} of {_BATCH}"
        require_equal(whole[own : own + 1], alone, what)
    other[:, 0] += 1
    beside = _turned(subject, other, pos, role)
    require_equal(beside[:, 1:], whole[:, 1:], f"{role}, heads beside one that changed")
    if role == "key" and subject.shares_keys:
        alone = _turned(subject, x[:, :1], pos, role)
        require_equal(alone, whole[:, :1], f"{role}, one head alone")


@law("scheme")
def half_precision_rounds_once(subject: Subject) -> None:
    """A transform or embedding in float16 is that in float32, rounded once."""
    pos = subject.positions(np.random.default_rng(4), 8)
    half = _vectors(subject, 8, "float16")
    for role in _ROLES:
        expected = _turned(subject, readonly(half.astype(np.float32)), pos, role)
        with np.errstate(over="ignore"):  # to infinity, as rounding does
            found, expected = _turned(subject, half, pos, role), expected.astype(np.float16)
        require(found.dtype == np.float16, f"{role} of float16 becomes {found.dtype}")
        require_equal(found, expected, f"{role}, pos {pos}")
    wide = posenc.embedding(subject.scheme, pos, subject.params)
    if wide is not None:
        narrow = posenc.embedding(subject.scheme, pos, subject.params, dtype=np.float16)
        require_equal(narrow, wide.astype(np.float16), f"embedding, pos {pos}")


@law("scheme")
def tokens_far_away_are_finite(subject: Subject) -> None:
    """A transform and an embedding are finite at every position that the scheme takes."""
    pos = np.asarray([*subject.reach, 0])
    for role in _ROLES:
        turned = _turned(subject, _vectors(subject, 3), pos, role)
        wrong = pos[~np.isfinite(turned).all(axis=(0, 1, 3))]
        require(not wrong.size, f"{role} is not finite at pos {wrong}")
    held = posenc.embedding(subject.scheme, pos, subject.params)
    if held is not None:
        wrong = pos[~np.isfinite(held).all(axis=-1)]
        require(not wrong.size, f"embedding is not finite at pos {wrong}")


@law("scheme")
def embedding_is_one_row_a_position(subject: Subject) -> None:
    """The embedding of a position is the same row, wherever the position stands."""
    high = min(subject.reach[1], 9)
    pos = np.asarray([[high, 0, 1], [1, 2, 2]])
    found = posenc.embedding(subject.scheme, pos, subject.params)
    if found is None:
        return
    require(found.ndim == 3 and found.shape[:2] == pos.shape, f"{pos.shape} gives {found.shape}")
    require(found.dtype == np.float32, f"float32 params give {found.dtype}")
    rng = np.random.default_rng(14)
    for many in (pos, subject.positions(rng, (_BATCH, 3)), subject.positions(rng, _LONG)):
        rows = np.asarray(posenc.embedding(subject.scheme, many, subject.params))
        for place in list(np.ndindex(many.shape))[:: max(1, many.size // 9)]:
            alone = posenc.embedding(subject.scheme, many[place][None], subject.params)
            what = f"pos {many[place]} at {place} of {many.shape}"
            require_equal(rows[place], np.asarray(alone)[0], what)


@law("scheme")
def gate_is_row_local(subject: Subject) -> None:
    """The gate of a token is computed from its own hidden state."""
    if not subject.gated:
        return
    for batch, length in ((_BATCH, 9), (1, _LONG)):
        x = readonly(subject.normal((batch, length, subject.width), 2).astype(np.float32))
        whole = _gates(subject, x)
        if whole is None:
            return
        shape = (batch, length, subject.heads)
        large = np.asarray(_gates(subject, readonly(100 * x)))
        require(whole.shape == shape, f"{x.shape} gives {whole.shape}, not (B, L, H)")
        require(np.all(np.isfinite(whole)), "a gate is not finite")
        require(np.all(np.isfinite(large)), "a gate of large hidden states is not finite")
        row, at = batch - 1, length // 2
        changed = np.array(x)
        changed[row, at] += 1
        again, others = np.array(_gates(subject, changed)), np.array(whole)
        again[row, at] = others[row, at] = 0
        require_equal(again, others, f"gates of {x.shape} beside a token that changed")
        # Matrices of another shape may be multiplied in another order.
        some = slice(at - 1, at + 3)
        alone = _gates(subject, readonly(x[row:, some]))
        what = f"tokens {some.start} to {some.stop - 1} of {length} in row {row} of {batch}, alone"
        assert_near(alone, whole[row:, some], VALUES["float32"], what)


def _gates(subject: Subject, x: Host) -> Host | None:
    found = subject.scheme.gate(x, params=subject.whole(), xp=xp)
    return None if found is None else np.asarray(found)


@law("scheme")
def float32_is_float64_rounded(subject: Subject) -> None:
    """A bias, a transform and an embedding are right to float32 in contexts of 131072 tokens."""
    low, high = (int(np.clip(end, -_CONTEXT, _CONTEXT)) for end in subject.reach)
    rng = np.random.default_rng(12)
    pos = np.concatenate([[low, high, high - 1], rng.integers(low, high, 5), rng.integers(0, 9, 4)])
    vectors = subject.normal((1, subject.heads, pos.size, subject.head_dim), 13)
    wide = _widened(subject)
    for role in _ROLES:

        def turned(times: float, role: Role = role) -> Host:
            x, params = times * vectors, wide.params
            return np.asarray(posenc.transform(subject.scheme, x, pos, role=role, params=params))

        narrow = _turned(subject, readonly(vectors.astype(np.float32)), pos, role)
        _require_rounded(narrow, turned(1), f"{role}, pos {pos}")
        _require_double(turned, f"{role}, pos {pos}")
    if subject.params and posenc.embedding(subject.scheme, pos, subject.params) is not None:

        def embedded(times: float) -> Host:  # without params it is float32 in any case
            params = _widened(subject, times).params
            return np.asarray(posenc.embedding(subject.scheme, pos, params))

        held = posenc.embedding(subject.scheme, pos, subject.params)
        _require_rounded(held, embedded(1), f"embedding, pos {pos}")
        _require_double(embedded, f"embedding, pos {pos}")
    if not subject.gated and subject.biased:

        def biased(times: float) -> Host:
            return np.asarray(_widened(subject, times).tile(pos, pos, "float64"))

        _require_rounded(subject.tile(pos, pos), biased(1), f"bias, pos {pos}")
        _require_double(biased, f"bias, pos {pos}")


def _widened(subject: Subject, times: float = 1) -> Subject:
    """With params in float64, so many times as large."""
    params = {name: np.asarray(times * a.astype(np.float64)) for name, a in subject.params.items()}
    return replace(subject, params=params)


def _require_double(of: Callable[[float], Host], what: str) -> None:
    """What follows its float64 argument at all, follows it where float32 cannot."""
    one = of(1)
    require(one.dtype == np.float64, f"{what}: float64 gives {one.dtype}")
    deaf = np.array_equal(of(1 + _NUDGE), one) and not np.array_equal(of(1.25), one)
    require(not deaf, f"{what}: computed in less than float64, which a change of 1e-12 shows")


def _require_rounded(narrow: Any, wide: Any, what: str) -> None:
    """Each number within some roundings of itself, or of 1."""
    narrow, wide = np.asarray(narrow, np.float64), np.asarray(wide, np.float64)
    hidden = wide == -np.inf
    require(np.array_equal(narrow == -np.inf, hidden), f"{what}: -inf in one of two floats alone")
    require(np.all(np.isfinite(narrow[~hidden])), f"{what}: not finite")
    apart = np.abs(np.subtract(narrow, wide, where=~hidden, out=np.zeros_like(wide)))
    allowed = ROUNDED * np.maximum(1, np.abs(np.where(hidden, 0, wide)))
    excess = np.unravel_index(np.argmax(apart / allowed), apart.shape)
    found = f"float32 says {narrow[excess]:.9g}, float64 {wide[excess]:.9g}"
    require(np.all(apart <= allowed), f"{what}: {found}")
