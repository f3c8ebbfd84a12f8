"""Laws of equivalence on one path: caches, packing, padding and batching change nothing.

Each compares what a path makes of a part with what the definition makes of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import posenc
from posenc.evaluate import transforms
from posenc.positions import left_padded, packed
from posenc.testing.framework import Framework, Host
from posenc.testing.law import law, require
from posenc.testing.lawbook.attention import reference
from posenc.testing.problem import Problem
from posenc.testing.subject import Subject
from posenc.testing.tolerances import PATHS, assert_near

_LENGTH = 12
_FLOAT32 = PATHS["float32"]
Tensors = Mapping[str, Host]


def _rows(tensors: Tensors, q_rows: Any, k_rows: Any) -> dict[str, Host]:
    """Queries at ``q_rows``; keys, values and hidden states at ``k_rows``."""
    rows = {"q": q_rows, "k": k_rows, "v": k_rows}
    return {n: tensors[n][:, :, at] for n, at in rows.items()} | {"x": tensors["x"][:, k_rows]}


def _placed(subject: Subject, tensors: Tensors, pos: Host, seg: Host, k_seg: Any = None) -> Problem:
    """A causal call at positions and segments, of one shape for all laws."""
    batch = len(tensors["q"])
    q_pos, q_seg, k_seg = (
        np.broadcast_to(a, (batch, pos.shape[-1]))
        for a in (pos, seg, seg if k_seg is None else k_seg)
    )
    where = {"q_pos": q_pos, "k_pos": q_pos, "q_seg": q_seg, "k_seg": k_seg}
    return subject.problem(tensors, causal=True, **where)


def _whole(subject: Subject, tensors: Tensors) -> Host:
    """Causal attention of a sequence, by the definition."""
    return reference(subject.problem(tensors, causal=True))


@law("path")
def decoding_equals_prefill(subject: Subject, framework: Framework, path: str) -> None:
    """The last queries, alone against all keys, give the last rows of the whole."""
    tensors = subject.tensors(_LENGTH)
    whole = _whole(subject, tensors)
    for start in (_LENGTH - 1, _LENGTH - 4):
        part = _rows(tensors, slice(start, None), slice(None))
        found = subject.problem(part, causal=True).attend(framework, path)
        assert_near(found, whole[:, :, start:], _FLOAT32, f"tokens from {start}")


@law("path")
def cache_may_hold_transformed_keys(subject: Subject, framework: Framework, path: str) -> None:
    """Keys that were transformed before they were cached are not transformed again."""
    if not transforms(subject.scheme):
        return
    tensors = subject.tensors(_LENGTH)
    whole, at = _whole(subject, tensors), np.arange(_LENGTH)
    cached = posenc.transform(subject.scheme, tensors["k"], at, role="key", params=subject.params)
    step = _rows({**tensors, "k": cached}, slice(_LENGTH - 1, None), slice(None))
    problem = subject.problem(step, causal=True, k_transformed=True)
    assert_near(problem.attend(framework, path), whole[:, :, -1:], _FLOAT32)


@law("path")
def packed_equals_separate(subject: Subject, framework: Framework, path: str) -> None:
    """Documents packed into one sequence, each from position 0, do not see each other."""
    sizes = [3, 5, 4]
    tensors = subject.tensors(_LENGTH)
    pos, seg = packed(sizes)
    found = _placed(subject, tensors, pos, seg).attend(framework, path)
    for document in range(len(sizes)):
        rows = np.flatnonzero(seg == document)
        alone = _whole(subject, _rows(tensors, rows, rows))
        assert_near(found[:, :, rows], alone, _FLOAT32, f"document {document}")


@law("path")
def left_padding_changes_nothing(subject: Subject, framework: Framework, path: str) -> None:
    """A sequence padded on the left gives what it gives alone, and 0 where it is padded."""
    tensors, pad = subject.tensors(_LENGTH), 4
    pos, q_seg, k_seg = left_padded([_LENGTH, _LENGTH - pad], _LENGTH)
    found = _placed(subject, tensors, pos, q_seg, k_seg).attend(framework, path)
    rows = slice(pad, None)
    second = {name: a[1:] for name, a in _rows(tensors, rows, rows).items()}
    assert_near(found[1:, :, rows], _whole(subject, second), _FLOAT32)
    require(not np.any(found[1, :, :pad]), "a padded query is not 0")


@law("path")
def batch_rows_keep_to_themselves(subject: Subject, framework: Framework, path: str) -> None:
    """Permuting the batch permutes the result, each row with positions of its own."""
    tensors = subject.tensors(_LENGTH)
    rng = np.random.default_rng(10)
    pos = np.stack([rng.permutation(2 * _LENGTH)[:_LENGTH] for _ in range(2)])
    seg = np.zeros_like(pos)
    turned = {name: a[::-1] for name, a in tensors.items()}
    found = _placed(subject, turned, pos[::-1], seg).attend(framework, path)
    for row in range(2):
        alone = {name: a[row : row + 1] for name, a in tensors.items()}
        expected = reference(_placed(subject, alone, pos[row : row + 1], seg[:1]))
        assert_near(found[1 - row], expected[0], _FLOAT32, f"row {row}")


@law("path")
def order_in_memory_does_not_matter(subject: Subject, framework: Framework, path: str) -> None:
    """Tokens shuffled together with their positions give the shuffled result."""
    tensors = subject.tensors(_LENGTH)
    order = np.random.default_rng(11).permutation(_LENGTH)
    shuffled = _rows(tensors, order, order)
    # Without segments, unlike elsewhere: gates must be summed by position then too.
    problem = subject.problem(shuffled, causal=True, q_pos=order, k_pos=order)
    found = problem.attend(framework, path)
    assert_near(found, _whole(subject, tensors)[:, :, order], _FLOAT32)


@law("path")
def causal_hides_the_future(subject: Subject, framework: Framework, path: str) -> None:
    """Under a causal mask later tokens change nothing; without one they do."""
    tensors, now = subject.tensors(_LENGTH), 7
    later = {name: np.array(array) for name, array in tensors.items()}
    for name in ("k", "v"):
        later[name][:, :, now:] += 3
    later["x"][:, now:] += 3
    for causal in (True, False):
        before, after = (
            subject.problem(arrays, causal=causal).attend(framework, path)[:, :, :now]
            for arrays in (tensors, later)
        )
        if causal:
            assert_near(after, before, _FLOAT32)
        elif not _hidden(subject, now):
            require(not np.array_equal(after, before), "nothing changes without the mask either")


def _hidden(subject: Subject, now: int) -> bool:
    """Whether the bias itself hides what comes after a token."""
    if subject.gated:
        return False
    dense = subject.tile(np.arange(now), np.arange(now, _LENGTH))
    return dense is not None and bool(np.all(dense == -np.inf))


@law("path")
def relative_scheme_may_begin_anywhere(subject: Subject, framework: Framework, path: str) -> None:
    """A relative bias, and nothing else of position, gives the same from any first position."""
    if not subject.scheme.relative or subject.gated or transforms(subject.scheme):
        return
    tensors, by = subject.tensors(_LENGTH), min(1000, subject.reach[1] + 1 - _LENGTH)
    pos, seg = np.arange(_LENGTH) + by, np.zeros(_LENGTH, int)
    found = _placed(subject, tensors, pos, seg).attend(framework, path)
    assert_near(found, _whole(subject, tensors), _FLOAT32)
