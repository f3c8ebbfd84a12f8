"""Decoding, packing, padding and batching change nothing, on every path."""

from __future__ import annotations

import numpy as np
import pytest
from cases import STEERING
from frameworks import HAS, ROUTES, assert_near
from subjects import DIM, SUBJECTS, WIDTH, heads, normal, params_of

import posenc
from posenc.positions import left_padded, packed

# The same sums over other blocks of keys, some of them masked: as two paths differ in float32.
FLOAT32 = 3e-6
# JAX compiles each shape for about a second: gates, a rotation with a bias, a table stand for all;
# for the path that is the core's own code, the first.
SOME = ["fading", "both", "t5"]


def subjects_of(route):
    if route is None or route.backend == "jax":
        return SOME[:1] if route is None or route.path == "reference" else SOME
    return STEERING


CALLS = [
    pytest.param(*p.values, name, marks=p.marks, id=f"{p.id}-{name}")
    for p in ROUTES
    for name in subjects_of(p.values[0])
]
every_call = pytest.mark.parametrize(("route", "subject"), CALLS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    if HAS["jax"]:
        monkeypatch.setattr("posenc_jax.blocks.BLOCK", 8)


def tensors(scheme, length, batch=2, seed=0):
    count = heads(scheme)
    shape = (batch, count, length, DIM)
    found = {name: normal(shape, seed + i, "float32") for i, name in enumerate("qkv")}
    return found | {"x": normal((batch, length, WIDTH), seed + 3, "float32")}


def some_rows(tensors, q_rows, k_rows):
    """Queries at ``q_rows``; keys, values and hidden states at ``k_rows``."""
    rows = {"q": q_rows, "k": k_rows, "v": k_rows}
    found = {name: tensors[name][:, :, at] for name, at in rows.items()}
    return found | {"x": tensors["x"][:, k_rows]}


@every_call
def test_decoding_equals_prefill(route, subject):
    scheme, length = SUBJECTS[subject], 7
    all_of, params = tensors(scheme, length), params_of(scheme)
    whole = route.attend(scheme, all_of, params, causal=True)
    for start, end in ((0, 3), (3, 5), (5, 6), (6, 7)):  # two chunks, then token by token
        part = some_rows(all_of, slice(start, end), slice(0, end))
        found = route.attend(scheme, part, params, causal=True)
        assert_near(found, whole[:, :, start:end], FLOAT32, f"tokens {start} to {end}")


@every_call
def test_a_cache_may_hold_keys_already_transformed(route, subject):
    scheme, length = SUBJECTS[subject], 7
    all_of, params = tensors(scheme, length), params_of(scheme)
    whole = route.attend(scheme, all_of, params, causal=True)
    cached = posenc.transform(scheme, all_of["k"], np.arange(length), role="key", params=params)
    step = some_rows(all_of | {"k": cached}, slice(6, 7), slice(0, 7))
    found = route.attend(scheme, step, params, causal=True, k_transformed=True)
    assert_near(found, whole[:, :, 6:], FLOAT32)


@every_call
def test_packed_documents_equal_separate_ones(route, subject):
    scheme, sizes = SUBJECTS[subject], [3, 6, 4]
    all_of, params = tensors(scheme, sum(sizes)), params_of(scheme)
    pos, seg = packed(sizes)
    where = {"q_pos": pos, "k_pos": pos, "q_seg": seg, "k_seg": seg}
    whole = route.attend(scheme, all_of, params, causal=True, **where)
    for n in range(len(sizes)):
        rows = np.flatnonzero(seg == n)
        alone = route.attend(scheme, some_rows(all_of, rows, rows), params, causal=True)
        assert_near(whole[:, :, rows], alone, FLOAT32, f"document {n}")


@every_call
def test_left_padding_equals_none(route, subject):
    scheme, total = SUBJECTS[subject], 9
    all_of, params = tensors(scheme, total), params_of(scheme)
    pos, q_seg, k_seg = left_padded([9, 5], total)
    where = {"q_pos": pos, "k_pos": pos, "q_seg": q_seg, "k_seg": k_seg}
    padded = route.attend(scheme, all_of, params, causal=True, **where)
    rows = slice(4, None)
    second = {name: a[1:] for name, a in some_rows(all_of, rows, rows).items()}
    alone = route.attend(scheme, second, params, causal=True)
    assert_near(padded[1:, :, rows], alone, FLOAT32)
    assert not np.any(padded[1, :, :4])


@every_call
def test_rows_of_the_batch_keep_to_themselves(route, subject):
    scheme, length = SUBJECTS[subject], 7
    all_of, params = tensors(scheme, length, batch=3), params_of(scheme)
    pos = np.asarray([range(7), [5, 3, 1, 0, 2, 4, 6], range(20, 6, -2)])
    where = {"q_pos": pos, "k_pos": pos}
    whole = route.attend(scheme, all_of, params, causal=True, **where)
    turn = [2, 0, 1]
    turned = {name: a[turn] for name, a in all_of.items()}
    where = {name: a[turn] for name, a in where.items()}
    found = route.attend(scheme, turned, params, causal=True, **where)
    assert_near(found, whole[turn], FLOAT32)


@every_call
def test_the_order_of_tokens_in_memory_does_not_matter(route, subject):
    scheme, length = SUBJECTS[subject], 7
    all_of, params = tensors(scheme, length), params_of(scheme)
    whole = route.attend(scheme, all_of, params, causal=True)
    order = np.asarray([4, 0, 6, 2, 1, 5, 3])
    pos = {"q_pos": order, "k_pos": order}
    found = route.attend(scheme, some_rows(all_of, order, order), params, causal=True, **pos)
    assert_near(found, whole[:, :, order], FLOAT32)


@every_call
def test_a_relative_scheme_may_begin_anywhere(route, subject):
    scheme, length = SUBJECTS[subject], 7
    if not scheme.relative:
        return
    all_of, params = tensors(scheme, length), params_of(scheme)
    whole = route.attend(scheme, all_of, params, window=4)
    pos = np.arange(1000, 1007)
    found = route.attend(scheme, all_of, params, window=4, q_pos=pos, k_pos=pos)
    assert_near(found, whole, FLOAT32)
