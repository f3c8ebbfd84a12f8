"""Every implementation equals the float64 reference, in values and in gradients."""

from __future__ import annotations

import numpy as np
import pytest
from cases import (
    CASES,
    STEERING,
    THOROUGH,
    Case,
    compiles,
    expected,
    longer,
    options_of,
    quick,
    tensors_of,
    waits,
    widens,
)
from frameworks import FUSED, HAS
from frameworks import route as named
from sample import exhaustive, long
from subjects import SUBJECTS, normal, params_of

from posenc import Tokens
from posenc.testing.examples import HEAD_DIM, HEADS
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR, assert_near

MISSING = [found for found in FUSED if found.values[0] is None]


def tried(calls):
    """Parameters of every call on every implementation."""
    return [
        pytest.param(
            route, *call, id="-".join((str(route), *call)), marks=[long] * waits(route, call)
        )
        for (route,) in (found.values for found in FUSED)
        if route is not None
        for call in calls(route)
    ] + [pytest.param(None, *[None] * 3, marks=found.marks, id=found.id) for found in MISSING]


@pytest.mark.parametrize(("route", "subject", "case", "dtype"), tried(quick))
def test_an_implementation_equals_the_reference(route, subject, case, dtype):
    compare(route, subject, case, dtype)


@long
@pytest.mark.parametrize(("route", "subject", "case", "dtype"), tried(longer))
def test_more_calls_equal_the_reference(route, subject, case, dtype):
    compare(route, subject, case, dtype)


@pytest.mark.parametrize("route", FUSED)
def test_a_scheme_that_is_added_brings_three_calls_or_none(route):
    calls = quick(route)
    if compiles(route):
        assert len(calls) < 20
    else:
        assert {subject for subject, *_ in calls} == set(STEERING)
        assert len(calls) <= 3 * len(STEERING) + len(THOROUGH) * len(CASES)


@exhaustive
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("route", FUSED)
def test_every_scheme_equals_the_reference(route, case):
    wrong = []
    for subject in STEERING:
        try:
            compare(route, subject, case, "float32")
        except pytest.skip.Exception:
            continue
        except AssertionError as error:
            wrong.append(f"{subject}: {error}")
    assert not wrong, "\n".join(wrong)


def compare(route, subject, case, dtype):
    """Values and gradients; a refusal is a skip."""
    if not HAS["torch"]:
        pytest.skip("gradients are compared with torch's autograd, torch is not installed")
    scheme, where = SUBJECTS[subject], CASES[case]
    tensors, params = tensors_of(scheme, where), params_of(scheme)
    options = {"dtype": dtype, **options_of(scheme, where)}
    values, gradients = expected(subject, case)
    d_out = normal(values.shape, 9)
    try:
        out, found = route.gradients(scheme, tensors, params, d_out, **options)
    except NotImplementedError as reason:
        if "no backward pass on a CPU" in str(reason):
            out = route.attend(scheme, tensors, params, **options)
            assert_near(out, values, ATTENTION_TOL[dtype])
            return
        # Whole rows, decays, regions, and queries wider than values are refused in any float; what
        # implementations serve is said elsewhere.
        of_scheme = scheme.hooks() & {"adjust_scores", "channel_decay", "regions"}
        if dtype != "float64" and not of_scheme and not widens(scheme):
            raise
        pytest.skip(f"refused: {reason}")
    assert_near(out, values, ATTENTION_TOL[dtype])
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        summed = name in params or name == "tokens.x"
        tolerance = ATTENTION_TOL[dtype] * (REDUCTION_FACTOR if summed else 1)
        assert_near(found[name], gradient, tolerance, f"gradient of {name}")


# Scores of 16-bit implementations are rounded to 8 or 11 bits at sizes of some hundreds only by
# mistake: a bias is float32 until it is added.
FAR = {"float16": 2e-2, "bfloat16": 6e-2}


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("hidden", [False, True], ids=["all_seen", "masked_keys"])
@pytest.mark.parametrize("route", FUSED)
def test_a_bias_far_away_keeps_its_differences(route, hidden, dtype):
    scheme, case = SUBJECTS["alibi-far"], Case(q_len=4, k_len=6)
    tensors, k_pos = tensors_of(scheme, case), np.arange(6)
    k_pos[-1] = 2000 if hidden else 5
    where = {
        "tokens": Tokens(pos=k_pos),
        "queries": Tokens(pos=np.arange(1000, 1004)),
        "causal": hidden,
    }
    values = named("numpy", "reference").attend(scheme, tensors, {}, dtype="float64", **where)
    try:
        found = route.attend(scheme, tensors, {}, dtype=dtype, **where)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    assert_near(found, values, FAR[dtype])


@pytest.mark.parametrize("route", FUSED)
def test_a_bias_beyond_float16_masks_nothing(route):
    scheme, case = SUBJECTS["alibi-far"], Case(q_len=4, k_len=6)
    tensors = tensors_of(scheme, case)
    where = {"tokens": Tokens(pos=np.arange(6)), "queries": Tokens(pos=np.arange(10**6, 10**6 + 4))}
    values = named("numpy", "reference").attend(scheme, tensors, {}, dtype="float64", **where)
    try:
        found = route.attend(scheme, tensors, {}, dtype="float16", **where)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    # At 10**6 a float32 bias is rounded to 1/16: what is promised is a finite, sensible answer.
    assert_near(found, values, 0.1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("route", FUSED)
def test_large_scores_do_not_overflow(route, grouped, dtype):
    scheme = SUBJECTS["nope"]
    tensors = tensors_of(scheme, Case(q_len=6, k_len=6, grouped=grouped))
    tensors["q"], tensors["k"] = (300 * np.sign(tensors[n] + 0.01) for n in "qk")
    options = {"causal": True, "window": 4}
    values = named("numpy", "reference").attend(scheme, tensors, {}, dtype="float64", **options)
    try:
        found = route.attend(scheme, tensors, {}, dtype=dtype, **options)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    assert_near(found, values, ATTENTION_TOL["bfloat16"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["torch", pytest.param("jax", marks=long)])
def test_auto_takes_the_reference_in_the_working_dtype(name, dtype):
    """A call that nothing else serves or that ``"auto"`` prefers there: scores are not rounded."""
    tensors = tensors_of(SUBJECTS["nope"], Case(q_len=6, k_len=6))
    tensors["bias"] = normal((1, HEADS, 6, 6), 5)
    found, expected = (
        named(name, implementation).attend(SUBJECTS["nope"], tensors, {}, dtype=dtype, softcap=20.0)
        for implementation in ("auto", "reference")
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("route", FUSED)
def test_a_bias_that_hides_every_key(route):
    scheme, case = SUBJECTS["fence"], Case(q_len=4, k_len=6)
    tensors, params = tensors_of(scheme, case), params_of(scheme)
    where = {
        "tokens": Tokens(pos=np.arange(6)),
        "queries": Tokens(pos=np.asarray([0, 1, 1000, 1001])),
    }
    d_out = normal((2, HEADS, 4, HEAD_DIM), 9)
    try:
        out, gradients = route.gradients(scheme, tensors, params, d_out, **where)
    except NotImplementedError as reason:
        assert "no backward pass on a CPU" in str(reason)  # noqa: PT017
        assert not np.any(route.attend(scheme, tensors, params, **where)[:, :, 2:])
        return
    assert not np.any(out[:, :, 2:])
    assert not np.any(gradients["q"][:, :, 2:])
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


def test_the_comparison_can_fail():
    assert_near([1.0, -np.inf], [1.0, -np.inf], 0)
    for wrong in ([1.0], [1.1, 0.0], [np.nan, 0.0], [np.inf, 0.0]):
        with pytest.raises(AssertionError):
            assert_near(wrong, [1.0, 0.0], 1e-2)
