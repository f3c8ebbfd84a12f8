"""Laws of a transform, an embedding and a gate: each token by itself."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np

import posenc
from posenc.protocol import Role
from posenc.testing.framework import Host, readonly
from posenc.testing.law import law, require, require_equal
from posenc.testing.subject import Subject

_TRIALS = 12
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


@law("scheme")
def half_precision_rounds_once(subject: Subject) -> None:
    """A transform or embedding in float16 is that in float32, rounded once."""
    pos = subject.positions(np.random.default_rng(4), 8)
    half = _vectors(subject, 8, "float16")
    for role in _ROLES:
        expected = _turned(subject, readonly(half.astype(np.float32)), pos, role)
        found = _turned(subject, half, pos, role)
        require(found.dtype == np.float16, f"{role} of float16 becomes {found.dtype}")
        require_equal(found, expected.astype(np.float16), f"{role}, pos {pos}")
    wide = posenc.embedding(subject.scheme, pos, subject.params)
    if wide is not None:
        narrow = posenc.embedding(subject.scheme, pos, subject.params, dtype=np.float16)
        require_equal(narrow, wide.astype(np.float16), f"embedding, pos {pos}")


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
    changed = np.array(x)
    changed[:, 2] += 1
    again = np.asarray(subject.scheme.gate(changed, params=params, xp=xp))
    others = [0, 1, 3, 4]
    require_equal(again[:, others], whole[:, others], "gates beside a token that changed")
