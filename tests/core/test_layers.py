"""Which scheme and window serve which layer, and which layers share learned arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from subjects import SUBJECTS

import posenc
from posenc.layers import LayerPlan, check_layer
from posenc.testing.examples import HEAD_DIM, HEADS

everywhere = pytest.mark.parametrize("subject", SUBJECTS)


def once(scheme):
    """Whether a model has one set of its arrays: asked of the scheme, not of the plan."""
    return (
        scheme.shared
        or posenc.embedding(scheme, np.arange(1), posenc.init_params(scheme)) is not None
    )


@everywhere
def test_equal_layers_share_what_a_model_has_once(subject):
    scheme, other = SUBJECTS[subject], posenc.T5Bias(HEADS, num_buckets=6)
    plan = LayerPlan.of([other, scheme, posenc.NoPE()], layers=7)
    assert plan.schemes == (other, scheme, posenc.NoPE()) * 2 + (other,)
    for one, two in itertools.combinations(range(7), 2):
        same = plan.schemes[one] == plan.schemes[two] and once(plan.schemes[one])
        assert (plan.sources[one] == plan.sources[two]) == same
        assert (plan.owners[one] == plan.owners[two]) == same
    assert plan.first_layers == tuple(sorted(set(plan.sources)))
    assert [plan.first_layers[owner] for owner in plan.owners] == list(plan.sources)
    assert hash(plan) == hash(LayerPlan.of(plan.schemes, 7))


def test_unequal_tables_are_two():
    near, far = posenc.T5Bias(HEADS), posenc.T5Bias(HEADS, max_distance=256)
    assert LayerPlan.of([near, far], 4).sources == (0, 1, 0, 1)
    assert LayerPlan.of(posenc.RoPE(HEAD_DIM), 3).sources == (0, 1, 2)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        (None, [None] * 5),
        (7, [7] * 5),
        ([4, 4, None], [4, 4, None, 4, 4]),
        ((None, np.int32(9)), [None, 9, None, 9, None]),
    ],
)
def test_windows_go_in_turn_by_themselves(windows, expected):
    plan = LayerPlan.of([posenc.T5Bias(HEADS), posenc.NoPE()], 5, windows)
    assert plan.windows == tuple(expected)
    assert all(type(window) in (int, type(None)) for window in plan.windows)
    assert plan.sources == LayerPlan.of(plan.schemes, 5).sources == (0, 1, 0, 3, 0)
    assert plan == LayerPlan(plan.schemes, plan.windows)
    assert (plan == LayerPlan(plan.schemes)) == (windows is None)
    assert hash(plan) == hash(LayerPlan(plan.schemes, plan.windows))


def test_the_narrower_of_two_windows_counts():
    plan = LayerPlan.of(posenc.NoPE(), 3, [8, 2, None])
    assert plan.windows_within(None) == plan.windows
    assert plan.windows_within(4) == (4, 2, 4)
    assert plan.windows_within(100) == (8, 2, 100)


@pytest.mark.parametrize(
    ("windows", "error", "message"),
    [
        (0, ValueError, "windows must be at least 1, got 0"),
        ([3, -1], ValueError, "windows must be at least 1, got -1"),
        (2.0, TypeError, "windows must be an integer, got 2.0"),
        (True, TypeError, "windows must be an integer, got True"),
        ("512", TypeError, "windows must be an integer, got '512'"),
        ([], ValueError, r"windows must be one, or 1 to layers=2 of them, got \(\)"),
        ([1, 2, 3], ValueError, r"1 to layers=2 of them, got \(1, 2, 3\)"),
    ],
)
def test_wrong_windows(windows, error, message):
    with pytest.raises(error, match=message):
        LayerPlan.of(posenc.NoPE(), 2, windows)


def test_a_plan_has_a_window_for_each_layer():
    with pytest.raises(ValueError, match=r"windows must be 2, one per layer, got \(4,\)"):
        LayerPlan((posenc.NoPE(),) * 2, (4,))


@pytest.mark.parametrize(
    ("scheme", "layers", "error", "message"),
    [
        ([], 2, ValueError, r"1 to layers=2 of them, got \(\)"),
        ([posenc.NoPE()] * 3, 2, ValueError, "1 to layers=2 of them"),
        (posenc.NoPE(), 0, ValueError, "layers must be at least 1, got 0"),
        (posenc.NoPE(), 2.0, TypeError, "layers must be an integer, got 2.0"),
        ("rope", 2, TypeError, "scheme must be an instance of a PositionScheme"),
        ([posenc.NoPE], 2, TypeError, "scheme must be an instance of a PositionScheme"),
        (posenc.NoPE(), None, TypeError, "layers is missing"),
        (LayerPlan.of(posenc.NoPE(), 3), 2, ValueError, "layers must be 3, .* of the plan, got 2"),
    ],
)
def test_wrong_plans(scheme, layers, error, message):
    with pytest.raises(error, match=message):
        LayerPlan.of(scheme, layers)


def test_a_plan_is_taken_as_it_is():
    plan = LayerPlan.of([posenc.NoPE(), posenc.RoPE(HEAD_DIM)], 3, [2, None])
    assert LayerPlan.of(plan) is LayerPlan.of(plan, 3) is plan
    assert len(plan) == 3
    with pytest.raises(ValueError, match="windows come from the plan, got windows=4"):
        LayerPlan.of(plan, windows=4)


def test_a_layer_that_is_not_there():
    assert check_layer(np.int64(1), 2) == check_layer(-1, 2) % 2 == 1
    for wrong in (2, -3):
        with pytest.raises(IndexError, match=f"layer must be 0 .. 1, got {wrong}"):
            check_layer(wrong, 2)
