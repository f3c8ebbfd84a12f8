"""Every scheme beside mpmath, up to position 2**24, on every framework; docs/exactness.json too."""

from __future__ import annotations

import importlib
import json
import os
from functools import cache

import exactness
import numpy as np
import oracles
import pytest
from oracles import CASES, DIGITS, HALVES, LIMITS, RANGES, Exact, answers, errors, ways
from sample import long

import posenc

DATA = json.loads(exactness.DATA.read_text(encoding="utf-8"))
# Of each scheme, the case that the quick part tries.
FIRST = {case.kind: case for case in reversed(CASES)}
MEASURE = {case.kind: case.measure for case in CASES}
# RoPE at other frequencies; tests/schemes/test_scalings.py compares all their digits.
SCALED = set(oracles.SCALED) - {"p_rope", "rope_yarn"}
# Half of mpmath's time; tests/schemes has their golden numbers.
SLOW = {"pope", "xpos", "fope", "sandwich"}
# To torch's compiler fixed positions are arguments like others: the same program.
WAYS = [way for way in ways() if not (way.fixed and way.compiler == "inductor")]


def tried(way, dtype):
    """All cases; where a compiler takes ten seconds for them, one a scheme, or none."""
    if way.compiler != "inductor":
        return CASES
    few = [case for case in CASES if case.kind not in SCALED]
    if dtype == "float32":
        return few
    return list({case.kind: case for case in few}.values()) if dtype in HALVES else []


@pytest.fixture(autouse=True)
def optimised(monkeypatch):
    """Programs as users have them, and the page: conftest.py asks XLA for none of this."""
    if "jax" in {way.framework.name for way in ways()}:
        options = importlib.import_module("posenc_jax.testing")._COMPILER_OPTIONS
        own = {"xla_backend_optimization_level": 3}
        if "fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
            own["xla_cpu_use_fusion_emitters"] = True
        monkeypatch.setitem(options, "jit", own)


def found(way, dtype, case):
    return _found(way, dtype, is_first(case))[case]


@cache
def _found(way, dtype, first):
    """The others apart: mpmath takes half a minute for them."""
    return answers([case for case in tried(way, dtype) if is_first(case) == first], way, dtype)


def is_first(case):
    """Whether it is the case of its scheme that the quick part tries."""
    return case.kind not in SCALED | SLOW and case is FIRST[case.kind]


def slow(way, case):
    """Whether it waits for a compiler, as JAX does for one operation after the other; or for
    mpmath, of more of the same.
    """
    return way.compiler is not None or way.framework.name == "jax" or not is_first(case)


def settings(dtypes):
    return [
        pytest.param(way, dtype, case, id=f"{way}-{dtype}-{case}", marks=[long] * slow(way, case))
        for way in WAYS
        for dtype in dtypes
        if dtype in way.framework.dtypes
        for case in tried(way, dtype)
    ]


def test_what_has_an_oracle_is_in_the_catalogue():
    assert set(MEASURE) <= set(posenc.catalogue())


@pytest.mark.parametrize(("way", "dtype", "case"), settings(DIGITS))
def test_promises(way, dtype, case):
    worst = dict(zip(RANGES, errors(case, found(way, dtype, case), dtype), strict=True))
    # Reasons beside the numbers. Biases are compared with the exact value: at most 2 ulp from it is
    # at most 2 from the nearest float, too.
    assert max(worst.values()) <= LIMITS[case.measure][dtype], worst


@pytest.mark.parametrize(("way", "dtype", "case"), settings(HALVES))
def test_halves_are_float32_rounded_once(way, dtype, case):
    narrow = found(way, "float32", case)
    rounded = Exact(narrow, np.zeros_like(narrow)).rounded(dtype)
    np.testing.assert_array_equal(found(way, dtype, case), rounded)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rounding_is_that_of_numpy(dtype):
    values = np.random.default_rng(0).standard_normal(1000) * 2.0 ** np.arange(-20, 30)[:, None]
    rounded = Exact(values, np.zeros_like(values)).rounded(dtype)
    with np.errstate(over="ignore"):  # float16 ends at 65504
        np.testing.assert_array_equal(rounded, values.astype(dtype))


def test_rounding_sees_which_side_of_a_tie_a_number_is_on():
    tie, rest = np.full(3, 1 + 2.0**-24), np.asarray([-1, 0, 1]) * 2.0**-80
    np.testing.assert_array_equal(Exact(tie, rest).rounded("float32"), [1, 1, 1 + 2.0**-23])


def cells():
    """``(scheme, dtype, number)`` of every error in the data."""
    for kind, scheme in DATA["schemes"].items():
        for dtype, ranges in scheme["positions"].items():
            yield from ((kind, dtype, value) for row in ranges.values() for value in row.values())
        for row in scheme.get("options", {}).values():
            yield from ((kind, dtype, value) for dtype, value in row.items())


def test_the_data_has_every_oracle_in_every_dtype_and_range():
    assert {(kind, dtype) for kind, dtype, _ in cells()} == {
        (k, d) for k in MEASURE for d in DIGITS
    }
    for kind, scheme in DATA["schemes"].items():
        options = {case.option for case in CASES if case.kind == kind}
        assert set(scheme.get("options", options)) == options
        assert all(list(rows) == exactness.NAMES for rows in scheme["positions"].values())


def test_the_data_keeps_the_promises():
    broken = [cell for cell in cells() if cell[2] > LIMITS[MEASURE[cell[0]]][cell[1]]]
    assert not broken


def test_the_page_is_that_of_the_data():
    page = exactness.PAGE.read_text(encoding="utf-8")
    assert page == exactness.page(DATA)
    summary = page.split("## Summary")[1].split("\n## ")[0]
    assert all(f"\n| {kind} |" in summary for kind in MEASURE)


@long  # mpmath takes seconds
def test_a_measurement_has_the_form_of_the_data(monkeypatch):
    kinds = ("alibi", "sinusoidal", "t5")
    monkeypatch.setattr(exactness, "CASES", [case for case in CASES if case.kind in kinds])
    monkeypatch.setattr(exactness, "WAYS", [way for way in WAYS if str(way) == "NumPy"])
    data = exactness.data_of(exactness.measure_errors())
    assert json.loads(exactness.dumped(data)) == data
    assert exactness.page(data).count("\n| sinusoidal |") == 1
    assert list(data) == list(DATA)
    for kind in kinds:
        ours, kept = data["schemes"][kind], DATA["schemes"][kind]
        assert list(ours) == list(kept)
        assert list(ours.get("options", ())) == list(kept.get("options", ()))
        for dtype in ("float64", "float32", "float16"):
            assert list(ours["positions"][dtype]) == list(kept["positions"][dtype])
            assert all(list(row) == ["NumPy"] for row in ours["positions"][dtype].values())
