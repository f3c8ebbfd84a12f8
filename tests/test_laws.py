"""What every scheme promises, on the catalogue and on the schemes of ``subjects``."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import array_api_compat.numpy as xp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from subjects import (
    DIM,
    HEADS,
    SUBJECTS,
    WIDTH,
    heads,
    normal,
    params_of,
    reach_of,
    readonly,
)

import posenc
from posenc.evaluate import bias_tile, is_gated
from posenc.params import Params, merged

# Vectorised exp and log of NumPy may round otherwise than scalar ones: one unit of the last place
# in each of the two that a bias calls.
ULPS = 4 * 2.0**-24
# float64 sums of coordinates up to 2**20: 53 bits less the 20 before the point, few roundings.
KEY_ONLY = 1e-8
SHIFTED = 1e-12  # the same rounding for a rotation, whose scores are below 10

everywhere = pytest.mark.parametrize("subject", SUBJECTS)
short = st.integers(1, 6)


@st.composite
def places(draw, scheme):
    """Positions of one axis: any, repeated, unordered; coordinates for a scheme with gates."""
    low, high = reach_of(scheme)
    pos = draw(arrays(np.int64, short, elements=st.integers(low, high)))
    return readonly(pos / np.float32(1024)).astype(np.float32) if is_gated(scheme) else pos


def whole(scheme, dtype="float32"):
    """Learned arrays and constants."""
    params = params_of(scheme)
    return merged(scheme, params, dtype=xp.dtype(dtype), device="cpu", xp=xp)


def of_head(scheme, head, dtype="float32"):
    """What one head sees: its numbers 0-d, its row of a table."""
    specs = scheme.param_specs()
    return Params(
        {
            name: a if name in specs and not specs[name].per_head else np.asarray(a[head])
            for name, a in whole(scheme, dtype).items()
        },
        xp.dtype(dtype),
    )


def tile(scheme, q, k, dtype="float32"):
    """The bias of every head ``(H, Q, K)``, or None."""
    column, row = q[None, None, :, None], k[None, None, None, :]
    found = bias_tile(scheme, column, row, whole(scheme, dtype), dtype=xp.dtype(dtype), xp=xp)
    if found is None:
        return None
    return np.broadcast_to(found, (1, heads(scheme), q.size, k.size))[0]


@everywhere
@given(data=st.data())
def test_a_bias_is_elementwise(subject, data):
    scheme = SUBJECTS[subject]
    q, k = data.draw(places(scheme)), data.draw(places(scheme))
    dense = tile(scheme, q, k)
    if dense is None:
        return
    some = slice(data.draw(st.integers(0, q.size - 1)), None)
    np.testing.assert_array_equal(tile(scheme, q[some], k[::2]), dense[:, some, ::2])
    for h in {0, heads(scheme) - 1}:
        params = of_head(scheme, h)
        for i, j in {(0, 0), (q.size - 1, 0), (0, k.size - 1)}:
            alone = scheme.bias(np.asarray(q[i]), np.asarray(k[j]), params=params, xp=xp)
            np.testing.assert_allclose(alone, dense[h, i, j], rtol=ULPS)
        block = scheme.bias(q[:, None], k[None, :], params=params, xp=xp)
        np.testing.assert_allclose(np.broadcast_to(block, dense[h].shape), dense[h], rtol=ULPS)


@everywhere
@given(data=st.data())
def test_a_transform_is_row_local(subject, data):
    scheme = SUBJECTS[subject]
    pos = data.draw(places(scheme)).astype(np.int64)
    order = data.draw(st.permutations(range(pos.size)))[: data.draw(st.integers(1, pos.size))]
    x = normal((2, heads(scheme), pos.size, DIM), 1, "float32")
    for role in ("query", "key"):
        options = {"role": role, "params": params_of(scheme)}
        all_rows = posenc.transform(scheme, x, pos, **options)
        assert (all_rows.shape, all_rows.dtype) == (x.shape, x.dtype)
        some = posenc.transform(scheme, x[:, :, order], pos[order], **options)
        np.testing.assert_allclose(some, all_rows[:, :, order], rtol=ULPS, atol=ULPS)
        stacked = posenc.transform(scheme, x, np.stack([pos, pos]), **options)
        np.testing.assert_array_equal(stacked, all_rows)


def moves(scheme, q, k, by):
    """Whether the bias changes when every position does."""
    return not np.array_equal(tile(scheme, q, k), tile(scheme, q + by, k + by))


@everywhere
@given(data=st.data())
def test_a_relative_bias_knows_differences_alone(subject, data):
    scheme = SUBJECTS[subject]
    if not scheme.relative:
        return
    q, k = data.draw(places(scheme)), data.draw(places(scheme))
    assert tile(scheme, q, k) is None or not moves(scheme, q, k, data.draw(st.integers(0, 2**20)))


@everywhere
def test_a_bias_that_claims_no_relativity_has_none(subject):
    scheme = SUBJECTS[subject]
    pos = np.arange(-3, 9)
    if scheme.relative or is_gated(scheme) or tile(scheme, pos, pos) is None:
        return
    assert moves(scheme, pos, pos, 7)


@everywhere
@given(data=st.data())
def test_a_key_bias_differs_from_the_bias_by_a_term_of_the_query(subject, data):
    scheme = SUBJECTS[subject]
    k = np.sort(data.draw(places(scheme)))
    if scheme.key_bias(k, params=of_head(scheme, 0, "float64"), xp=xp) is None:
        return
    for h in range(heads(scheme)):
        params = of_head(scheme, h, "float64")
        for q in (k[-1], k[-1] + 5):
            left = scheme.bias(np.asarray(q), k, params=params, xp=xp)
            rest = left - scheme.key_bias(k, params=params, xp=xp)
            np.testing.assert_allclose(rest, rest[0], rtol=0, atol=KEY_ONLY * 2**20 / 1024)


class Recording(Params):
    """Params that remember what was read."""

    def __init__(self, params):
        super().__init__(params, params.dtype)
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


@everywhere
def test_a_scheme_reads_what_it_declares(subject):
    scheme = SUBJECTS[subject]
    one, all_heads = (
        Recording(of_head(scheme, 0)),
        Recording(Params(whole(scheme), xp.float32)),
    )
    pos = np.arange(3)
    scheme.bias(pos[:, None], pos[None, :], params=one, xp=xp)
    scheme.key_bias(pos, params=one, xp=xp)
    for role in ("query", "key"):
        scheme.transform(normal((3, DIM), 0, "float32"), pos, role=role, params=one, xp=xp)
    scheme.embedding(pos, params=all_heads, xp=xp)
    scheme.gate(normal((3, WIDTH), 0, "float32"), params=all_heads, xp=xp)
    specs, constants = set(scheme.param_specs()), set(scheme.constants())
    assert not specs & constants
    assert one.read | all_heads.read == specs | constants


def answers(scheme):
    """All that a scheme says, on read-only arrays."""
    pos, params = readonly(np.arange(12)), params_of(scheme)
    places = readonly(pos / 8).astype(np.float32) if is_gated(scheme) else pos
    x = normal((1, heads(scheme), 12, DIM), 2, "float32")
    found = [tile(scheme, places, places), posenc.embedding(scheme, pos, params)]
    found += [posenc.transform(scheme, x, pos, role=r, params=params) for r in ("query", "key")]
    found += [np.asarray(scheme.scale(DIM))]
    hidden = normal((1, 12, WIDTH), 3, "float32")
    found.append(posenc.coordinates(scheme, hidden, params))
    return found


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_schemes_share_no_state(subject):
    scheme = SUBJECTS[subject]
    before = answers(scheme)
    for other in SUBJECTS.values():
        theirs = answers(other)
        if (
            type(other) is type(scheme)
            and other != scheme
            and not {**params_of(scheme), **params_of(other)}
        ):
            assert heads(other) != heads(scheme) or not same(before, theirs), other
    assert same(before, answers(scheme))
    assert same(before, answers(replace(scheme)))


@everywhere
def test_a_scheme_is_a_frozen_value(subject):
    scheme = SUBJECTS[subject]
    again = replace(scheme)
    assert again == scheme
    assert hash(again) == hash(scheme)
    for twin in (pickle.loads(pickle.dumps(scheme)), copy.deepcopy(scheme), copy.copy(scheme)):
        assert twin == scheme
        assert hash(twin) == hash(scheme)
        assert same(answers(twin), answers(scheme))
    for name in ["brand_new", *(field.name for field in fields(scheme))]:
        with pytest.raises(FrozenInstanceError):
            setattr(scheme, name, 0)


def test_different_schemes_are_unequal():
    schemes = set(SUBJECTS.values())
    assert len(schemes) == len(SUBJECTS)


@everywhere
def test_a_scheme_at_a_length_is_a_scheme(subject):
    scheme = SUBJECTS[subject]
    longer = scheme.at_length(64)
    assert isinstance(longer, type(scheme))
    untouched = type(scheme).at_length is posenc.PositionScheme.at_length
    assert (longer is scheme) if untouched else longer != scheme.at_length(128)
    assert longer.param_specs().keys() == scheme.param_specs().keys()


@everywhere
def test_an_embedding_is_one_row_a_position(subject):
    scheme, pos = SUBJECTS[subject], np.asarray([[3, 0, 5], [5, 1, 1]])
    found = posenc.embedding(scheme, pos, params_of(scheme))
    if found is None:
        return
    assert found.shape[:2] == (2, 3)
    assert found.dtype == np.float32
    one = posenc.embedding(scheme, np.asarray([5]), params_of(scheme))[0]
    np.testing.assert_array_equal(found[0, 2], one)
    np.testing.assert_array_equal(found[1, 0], one)
    half = posenc.embedding(scheme, pos, params_of(scheme), dtype=np.float16)
    np.testing.assert_array_equal(half, found.astype(np.float16))


@pytest.mark.parametrize("pair", ["rope", "rope-interleaved", "rope-partial", "rope-base", "both"])
@given(data=st.data())
def test_rotated_scores_depend_on_the_difference_alone(pair, data):
    scheme = SUBJECTS[pair]
    steps = st.integers(-(2**20), 2**20)
    i, j, by = data.draw(steps), data.draw(steps), data.draw(steps)
    q, k = normal((1, DIM), 4), normal((1, DIM), 5)

    def score(i, j):
        turned = posenc.transform(scheme, q, np.asarray([i]), role="query")
        return turned @ posenc.transform(scheme, k, np.asarray([j]), role="key").T

    np.testing.assert_allclose(score(i, j), score(i + by, j + by), rtol=0, atol=SHIFTED)


def test_the_number_of_heads_is_that_of_the_subjects():
    assert {heads(s) for s in SUBJECTS.values()} >= {HEADS}
