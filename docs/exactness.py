"""Regenerates docs/exactness.md: ``python docs/exactness.py``. A few minutes on one core.

Compares every scheme that has an oracle in ``docs/oracles.py`` with it, on every installed
framework, eager and compiled, in every dtype.
"""

from __future__ import annotations

import datetime
import platform
import re
import time
import warnings
from collections.abc import Iterable, Sequence
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

import numpy as np
import oracles
from oracles import CASES, DIGITS, LENGTH, LIMITS, POSITIONS, RANGES, Case

HERE = Path(__file__).parent
WAYS = oracles.ways()
NAMES = [f"2^{reach.bit_length() - 1}" for reach in RANGES]
Errors = dict[tuple[Case, str, str], np.ndarray]  # of a case, a way and a dtype: one per range

HEAD = """# How exact schemes are

Made by `python docs/exactness.py`. It compares posenc's results with mpmath, which computes each
paper's formula to 50 digits and uses nothing of posenc (`docs/oracles.py`). Every figure is the
worst of its kind, not an average: {values:,} values in all.

- **Positions**: five ranges, up to 2^7, 2^12, 2^17, 2^20 and 2^24, of {length} positions each. A
  range holds 0, all powers of two and their neighbours, its ends, and random positions, of both
  signs. For a learned table positions start at 0. Keys are at the ends too, so distances reach
  2^25.
- **Units**: sines, cosines, embeddings and rotated vectors are at most 1. Their errors are in
  spacings of the numbers in [1/2, 1): {units}.
  Errors of ALiBi's biases are in the spacing at each value, its ulp. In both units correct
  rounding is off by at most 0.50. T5, learned and NoPE copy numbers: their figure counts wrong
  values.
- **Ways**: {ways}.
  All are eager except inductor and jit. "Fixed" compiles the positions in as constants instead of
  arguments; torch makes them arguments again. JAX has 64-bit types in float64 only, and NumPy has
  no bfloat16.
- **Versions**: {versions}
- **Date**: {date}

## Promises

`tests/docs/test_exactness.py` tests them for each scheme on this page on each framework, and tests
this page against them.

|  | float64 | float32 | float16, bfloat16 |
| :-- | :-- | :-- | :-- |
| sines, cosines, embeddings, rotated vectors | within 2^-51 | within 2^-22 | rounded once |
| ALiBi's biases | within {ulp64:.0f} ulp | within {ulp32:.0f} ulp | rounded once |
| biases and factors with a logarithm or a power | {elementary} | {elementary} | rounded once |
| sums of 16 gates (FoX, CABLE) | {sums} | {sums} | rounded once |
| Sandwich, FIRE, PoPE, xPos | {largest} | {largest} | rounded once |
| T5's buckets | equal | equal | equal |
| copied numbers | equal | equal | rounded once |

They hold up to position 2^24, for negative positions too, traced or not. "Rounded once" means
equal bit for bit to the float32 result, cast.
"""

MEASURES = {
    "bounded": "spacing in [1/2, 1)",
    "ulp": "ulp",
    "sum": "ulp",
    "elementary": "ulp",
    "largest": "spacing of the largest value",
    "copy": "wrong values",
}

FACTOR = (
    "Pairs (0.75, 0) are rotated, so that cosines times the factor of the scaling are at most 1."
)

NOTES = {
    "rope": "Pairs (1, 0) are rotated, so results are cosines and sines. `vectors` rotates random "
    "pairs of\nlength at most 1, in the layout half.",
    "rope_longrope": FACTOR,
    "rope_yarn": FACTOR,
    "t5": "The table's numbers differ in every dtype, so a wrong bucket is a wrong value.",
}

PRODUCT = """## Against a float32 product

The largest error of `sin(pos * f)` and `cos(pos * f)` over the frequencies `10000**(-k/16)`. The
column posenc is the sinusoidal embedding in float32, over all ways. The last column is NumPy's sine
and cosine of the product `np.float32(pos) * np.float32(f)`, computed here at the same positions.
"""


def main() -> None:
    """Measure and write the page."""
    # As in pyproject.toml: the warning does not change the result.
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
    begin = time.perf_counter()
    errors = measure_errors()
    kinds = list(dict.fromkeys(case.kind for case in CASES))
    parts = [head(), summary(errors, kinds), *(section(errors, kind) for kind in kinds)]
    parts.append(product_section(errors))
    (HERE / "exactness.md").write_text("\n".join(parts), encoding="utf-8")
    print(f"docs/exactness.md: {time.perf_counter() - begin:.0f} s")


def measure_errors() -> Errors:
    """Every case, way and dtype; one program holds one scheme with all its options."""
    errors: Errors = {}
    for way in WAYS:
        for dtype in (d for d in DIGITS if d in way.framework.dtypes):
            begin = time.perf_counter()
            for kind in dict.fromkeys(case.kind for case in CASES):
                cases = [case for case in CASES if case.kind == kind]
                for case, answer in oracles.answers(cases, way, dtype).items():
                    errors[case, str(way), dtype] = oracles.errors(case, answer, dtype)
            print(f"{way}, {dtype}: {time.perf_counter() - begin:.1f} s", flush=True)
    return errors


def head() -> str:
    """Conditions of the measurement, and the promises."""
    units = ", ".join(f"2^-{digits} in {dtype}" for dtype, digits in DIGITS.items())
    packages = [p for p in ("posenc", "numpy", "torch", "jax", "mpmath") if _is_installed(p)]
    versions = [f"python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]
    runs = sum(len(set(DIGITS) & set(way.framework.dtypes)) for way in WAYS)
    return HEAD.format(
        length=LENGTH,
        units=units,
        ways=", ".join(map(str, WAYS)),
        versions=", ".join(versions),
        date=datetime.datetime.now(datetime.UTC).date(),
        values=runs * sum(case.exact.high.size for case in CASES),
        ulp64=LIMITS["ulp"]["float64"],
        ulp32=LIMITS["ulp"]["float32"],
        elementary=f"within {LIMITS['elementary']['float32']:.0f} ulp",
        sums=f"within {LIMITS['sum']['float32']:.0f} ulp",
        largest=f"within {LIMITS['largest']['float32']:.0f} spacings of the largest",
    )


def summary(errors: Errors, kinds: Iterable[str]) -> str:
    """The worst of each scheme in each dtype."""
    rows = [
        [kind, MEASURES[measure_of(kind)], *(worst(errors, kind=kind, dtype=d) for d in DIGITS)]
        for kind in kinds
    ]
    caption = "The worst over all options, positions and ways."
    return "\n".join(["## Summary", "", caption, "", table(["scheme", "unit", *DIGITS], rows), ""])


def section(errors: Errors, kind: str) -> str:
    """One scheme: its dtypes and ranges by way, then its options."""
    cases = [case for case in CASES if case.kind == kind]
    copied = measure_of(kind) == "copy"
    lines = [f"## {kind}", "", *([NOTES[kind], ""] if kind in NOTES else [])]
    if copied:
        names = "; ".join(case.option for case in cases if case.option)
        total = sum(case.exact.high.size for case in cases)
        lines += [f"Wrong values among {total:,}{f' ({names})' if names else ''}:", ""]
    rows = [row for dtype in DIGITS for row in rows_of(errors, kind, dtype)]
    lines += [table(["dtype", "positions up to", *map(str, WAYS)], rows), ""]
    if len(cases) > 1 and not copied:
        rows = [[c.option, *(worst(errors, case=c, dtype=d) for d in DIGITS)] for c in cases]
        lines += ["Its options, over all ways and positions:", ""]
        lines += [table(["option", *DIGITS], rows), ""]
    return "\n".join(lines)


def rows_of(errors: Errors, kind: str, dtype: str) -> list[list[str]]:
    """One row per range; equal neighbours become one."""
    rows: list[list[str]] = []
    ends: list[list[str]] = []
    for i, name in enumerate(NAMES):
        cells = [worst(errors, kind=kind, way=str(w), dtype=dtype, at=i) for w in WAYS]
        if rows and rows[-1] == cells:
            ends[-1][1:] = [name]
        else:
            rows.append(cells)
            ends.append([name])
    return [[dtype, " to ".join(e), *cells] for e, cells in zip(ends, rows, strict=True)]


def product_section(errors: Errors) -> str:
    """Exact angles against the angles of a float32 product."""
    exact = [oracles.frequency(10_000.0, Fraction(k, 16)) for k in range(16)]
    where = POSITIONS["pos"][..., None]
    sin, cos = (
        oracles.each(function, where, exact).astype(float)
        for function in (oracles.sine, oracles.cosine)
    )
    f = np.asarray(exact, float).astype(np.float32)
    angle = where.astype(np.float32) * f
    off = np.maximum(np.abs(np.sin(angle) - sin), np.abs(np.cos(angle) - cos))
    case = next(case for case in CASES if str(case) == "sinusoidal, interleaved")
    ours = np.max([e for (c, _, d), e in errors.items() if (c, d) == (case, "float32")], axis=0)
    rows = [
        [name, f"{ours[i] * 2.0**-24:.1e}", f"{np.max(off[i]):.1e}"] for i, name in enumerate(NAMES)
    ]
    names = ["positions up to", "posenc", "float32 product"]
    return "\n".join([PRODUCT, table(names, rows), ""])


def measure_of(kind: str) -> str:
    """The unit of a scheme's errors."""
    return next(case.measure for case in CASES if case.kind == kind)


def worst(
    errors: Errors,
    *,
    dtype: str,
    kind: str | None = None,
    case: Case | None = None,
    way: str | None = None,
    at: int | slice = slice(None),
) -> str:
    """The worst error that fits the arguments, as a cell; the count for wrong values."""
    fit = [
        (c.measure, worst_of_ranges[at])
        for (c, w, d), worst_of_ranges in errors.items()
        if d == dtype and kind in (None, c.kind) and case in (None, c) and way in (None, w)
    ]
    if not fit:
        return "-"
    if fit[0][0] == "copy":
        return str(sum(int(np.sum(values)) for _, values in fit))
    return f"{max(float(np.max(values)) for _, values in fit):.2f}"


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; text to the left, numbers to the right."""
    rows = list(rows)
    number = re.compile(r"-|[\d.e-]+")
    numbers = [all(number.fullmatch(row[i]) for row in rows) for i in range(len(names))]
    lines = [names, ["--:" if right else ":--" for right in numbers], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
