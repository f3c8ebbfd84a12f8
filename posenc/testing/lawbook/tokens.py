"""Laws of a transform, an embedding and a gate: each token by itself."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xp
import numpy as np

import posenc
from posenc.protocol import Role
from posenc.testing.framework import Host, readonly
from posenc.testing.law import law, require, require_equal
from posenc.testing.subject import Subject
from posenc.testing.tolerances import ROUNDED

_TRIALS = 12
_CONTEXT = 2**17
_ROLES: tuple[Role, Role] = ("query", "key")


def _turned(subject: Subject, x: Host, pos: Host, role: Role) -> Host:
    return np.asarray(posenc.transform(subject.scheme, x, pos, role=role, params=subject.params))


def _vectors(subject: Subject, length: int, dtype: str = "float32") -> Host:
    shape = (2, subject.heads, length, subject.head_dim)
    return readonly(subject.normal(shape, 1).astype(dtype))


@law("scheme")
def transform_is_row_local(subject: Subject) -> None:
    """A query or key is transformed by its own position, whatever stands beside it."""
    rng = np.random.default_rng(3)
    for role in _ROLES:
        for _ in range(_TRIALS):
            pos = subject.positions(rng)
            x, order = _vectors(subject, pos.size), rng.permutation(pos.size)[:3]
            whole = _turned(subject, x, pos, role)
            require(whole.shape == x.shape, f"{role}: {x.shape} becomes {whole.shape}")
            part = _turned(subject, x[:, :, order], pos[order], role)
            require_equal(part, whole[:, :, order], f"{role}, pos {pos[order]} of {pos}")
            batched = _turned(subject, x, np.stack([pos, pos]), role)
            require_equal(batched, whole, f"{role}, pos (B, L) of {pos}")
            other = np.array(x)
            other[:, 0] += 1
            beside = _turned(subject, other, pos, role)[:, 1:]
            require_equal(beside, whole[:, 1:], f"{role}, heads beside one that changed")


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
        require(np.all(np.isfinite(turned)), f"{role} at one of {pos}")
    held = posenc.embedding(subject.scheme, pos, subject.params)
    require(held is None or np.all(np.isfinite(held)), f"embedding at one of {pos}")


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
    for at in np.ndindex(pos.shape):
        alone = posenc.embedding(subject.scheme, pos[at][None], subject.params)
        require_equal(found[at], np.asarray(alone)[0], f"pos {pos[at]}")


@law("scheme")
def gate_is_row_local(subject: Subject) -> None:
    """The gate of a token is computed from its own hidden state."""
    if not subject.gated:
        return
    x = readonly(subject.normal((2, 5, subject.width), 2).astype(np.float32))
    params = subject.whole()
    whole = subject.scheme.gate(x, params=params, xp=xp)
    if whole is None:
        return
    require(whole.shape == (2, 5, subject.heads), f"{x.shape} gives {whole.shape}, not (B, L, H)")
    require(np.all(np.isfinite(whole)), "a gate is not finite")
    large = subject.scheme.gate(readonly(100 * x), params=params, xp=xp)
    require(np.all(np.isfinite(np.asarray(large))), "a gate of large hidden states is not finite")
    changed = np.array(x)
    changed[:, 2] += 1
    again = np.asarray(subject.scheme.gate(changed, params=params, xp=xp))
    others = [0, 1, 3, 4]
    require_equal(again[:, others], whole[:, others], "gates beside a token that changed")


@law("scheme")
def float32_is_float64_rounded(subject: Subject) -> None:
    """A bias, a transform and an embedding are right to float32 in contexts of 131072 tokens."""
    low, high = (int(np.clip(end, -_CONTEXT, _CONTEXT)) for end in subject.reach)
    rng = np.random.default_rng(12)
    pos = np.concatenate([[low, high, high - 1], rng.integers(low, high, 5), rng.integers(0, 9, 4)])
    wide = {name: a.astype(np.float64) for name, a in subject.params.items()}
    vectors = subject.normal((1, subject.heads, pos.size, subject.head_dim), 13)
    for role in _ROLES:
        narrow = _turned(subject, readonly(vectors.astype(np.float32)), pos, role)
        full = posenc.transform(subject.scheme, vectors, pos, role=role, params=wide)
        _require_rounded(narrow, full, f"{role}, pos {pos}")
    held = [posenc.embedding(subject.scheme, pos, params) for params in (subject.params, wide)]
    if held[0] is not None and subject.params:  # without params it is float32 in any case
        _require_rounded(held[0], held[1], f"embedding, pos {pos}")
    if not subject.gated and subject.biased:
        single, double = (subject.tile(pos, pos, dtype) for dtype in ("float32", "float64"))
        _require_rounded(single, double, f"bias, pos {pos}")


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
