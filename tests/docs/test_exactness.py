"""Every scheme beside mpmath, up to position 2**24, on every framework; docs/exactness.md too."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import oracles
import pytest
from oracles import CASES, DIGITS, HALVES, LIMITS, RANGES, Exact, answers, errors, ways
from sample import long

import posenc

PAGE = (Path(__file__).parents[2] / "docs" / "exactness.md").read_text(encoding="utf-8")
MEASURE = {case.kind: case.measure for case in CASES}
# RoPE at other frequencies; tests/schemes/test_scalings.py compares all their digits.
SCALED = set(oracles.SCALED) - {"p_rope", "rope_yarn"}
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


def found(way, dtype, case):
    return _found(way, dtype, case.kind in SCALED)[case]


@cache
def _found(way, dtype, scaled):
    """Those of other frequencies apart: mpmath takes 20 seconds for them."""
    return answers([c for c in tried(way, dtype) if (c.kind in SCALED) == scaled], way, dtype)


def slow(way, case):
    """Whether it waits for a compiler, as JAX does for one operation after the other; or for
    mpmath, of more of the same.
    """
    return way.compiler is not None or way.framework.name == "jax" or case.kind in SCALED


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
    """``(scheme, dtype, text)`` of every error on the page."""
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL):
        rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line[:1] == "|"]
        names = []
        for row in rows:
            names = row if row[0] in ("scheme", "dtype", "option") else names
            kind = title if title in MEASURE else row[0]
            for name, text in zip(names, row, strict=False):
                dtype = row[0] if row[0] in DIGITS else name
                if kind in MEASURE and dtype in DIGITS and re.fullmatch(r"[\d.]+", text):
                    yield kind, dtype, text


def test_the_page_has_every_oracle_in_every_dtype():
    named = {(kind, dtype) for kind, dtype, _ in cells()}
    assert named == {(kind, dtype) for kind in MEASURE for dtype in DIGITS}
    summary = PAGE.split("## Summary")[1].split("\n## ")[0]
    assert all(f"\n| {kind} |" in summary for kind in MEASURE)


def test_the_page_keeps_the_promises():
    broken = [
        (kind, dtype, text)
        for kind, dtype, text in cells()
        if float(text) > LIMITS[MEASURE[kind]][dtype]
    ]
    assert not broken
