"""The bounds that tolerances follow from, beside sums in many orders and the calls they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import CASES, STEERING, case_of
from roundings import products_of, softmax
from subjects import SUBJECTS

from posenc.testing.attention_case import AttentionCase
from posenc.testing.tolerances import ATTENTION_TOL, UNIT, attention_bound, rounding_bound

# As instruction sets add: one number after another, in so many lanes, in a tree.
ORDERS = (1, 4, 8, 16, 64, "tree")


def added(values, order):
    """The sum in ``order``, every step rounded to the dtype of the values."""
    if order == "tree":
        while len(values) > 1:
            values = values[::2] + values[1::2]
        return values[0]
    lanes = np.zeros(order, values.dtype)
    for each in values.reshape(-1, order):
        lanes = lanes + each
    return added(lanes, 1) if order > 1 else lanes[0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_a_sum_in_any_order_is_within_its_bound(dtype, order):
    rng = np.random.default_rng(0)
    for terms, shift in ((64, 0.0), (64, 1.0), (1024, 0.0), (1024, 1.0)):
        values = (rng.standard_normal(terms) + shift).astype(dtype)
        error = abs(float(added(values, order)) - math.fsum(values.astype(float)))
        assert error <= rounding_bound(terms - 1, np.sum(np.abs(values), dtype=float), dtype)


def test_a_bound_is_not_one_of_a_coarser_dtype():
    values = np.random.default_rng(0).standard_normal(1024) + 1
    found = float(added(values.astype("float16"), 1))
    assert abs(found - math.fsum(values)) > rounding_bound(1023, np.sum(np.abs(values)), "float32")


def test_few_roundings_may_all_have_one_sign():
    assert [rounding_bound(n) for n in (0, 1, 16)] == [n * UNIT["float32"] for n in (0, 1, 16)]
    assert rounding_bound(100, 3.0, "float16") == 40 * 3 * 2.0**-11


def effects(problem: AttentionCase, half: bool):
    """The root of the sum of squares of what each rounding does to each number of the result.

    In units of the roundoff, where each is as large as it can be.
    """
    products, bias, seen, v = products_of(problem)
    scores = products.sum(axis=-1)
    weights, _ = softmax(scores + bias, seen, 0.0)
    out = weights @ v
    # Of a weight to the result, per unit of its score.
    reach = weights[..., None] * (v[:, :, None] - out[..., None, :])
    square = np.sum(products**2, axis=-1)
    if half:  # casts of q and k, before and after they are turned, and of the score
        of_score = 4 * square + scores**2
        rest = 2 * np.sum((weights[..., None] * v[:, :, None]) ** 2, axis=-2) + out**2
    else:  # products, their sums, turned channels, the bias and its sum
        running = np.sum(np.cumsum(products, axis=-1) ** 2, axis=-1)
        of_score = 9 * square + running + 3 * bias**2 + (scores + bias) ** 2
        sums = np.cumsum(weights[..., None] * v[:, :, None], axis=-2)
        total = np.sum(np.cumsum(weights, axis=-1) ** 2, axis=-1)[..., None] * out**2
        rest = np.sum(sums**2, axis=-2) + total + 2 * np.sum(reach**2, axis=-2) + out**2
    squares = np.sum(of_score[..., None] * reach**2, axis=-2) + rest
    return np.sqrt(np.max(squares)) / max(1.0, np.max(np.abs(out)))


@pytest.mark.parametrize("case", ["plain", "shuffled", "everything"])
def test_tolerances_have_room_for_all_roundings_of_the_calls_that_are_compared(case):
    largest = {"float32": 0.0, "bfloat16": 0.0}
    for subject in STEERING:
        problem = case_of(SUBJECTS[subject], CASES[case])
        for dtype in largest:
            found = 4 * effects(problem, half=dtype == "bfloat16") * UNIT[dtype]
            largest[dtype] = max(largest[dtype], found)
    for dtype, found in largest.items():
        assert found <= ATTENTION_TOL[dtype] <= 6 * found, (dtype, found)


def test_a_bound_of_attention_grows_with_what_is_summed():
    for dtype in UNIT:
        assert attention_bound(dtype, score=16.0) > attention_bound(dtype)
    assert attention_bound("float32", keys=2000) > 2 * ATTENTION_TOL["float32"]
    assert attention_bound("bfloat16", keys=2000) == ATTENTION_TOL["bfloat16"]  # sums are float32
