"""Regenerates docs/exactness.json and docs/exactness.md: ``python docs/exactness.py``.

Compares every scheme that has an oracle in ``docs/oracles.py`` with it, on every installed
framework, eager and compiled, in every dtype. A few minutes on one core. ``--page-only`` writes the
page from the data.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import time
import warnings
from collections.abc import Iterable, Sequence
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import oracles
from oracles import CASES, DIGITS, LENGTH, LIMITS, POSITIONS, RANGES, Case

HERE = Path(__file__).parent
DATA, PAGE = HERE / "exactness.json", HERE / "exactness.md"
WAYS = oracles.ways()
NAMES = [f"2^{reach.bit_length() - 1}" for reach in RANGES]
Errors = dict[tuple[Case, str, str], np.ndarray]  # of a case, a way and a dtype: one per range

HEAD = """# How exact schemes are

Made by `python docs/exactness.py`. It compares posenc's results with mpmath, which computes each
paper's formula to 50 digits and uses nothing of posenc (`docs/oracles.py`). Every figure is the
worst of its kind, not an average: {values:,} values in all. [exactness.json](exactness.json) has
the worst of each scheme by dtype, range of positions, framework and option.

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
the data against them.

|  | float64 | float32 | float16, bfloat16 |
| :-- | :-- | :-- | :-- |
| sines, cosines, embeddings, rotated vectors | within 2^-51 | within 2^-22 | rounded once |
| ALiBi's biases | within {ulp64:.0f} ulp | within {ulp32:.0f} ulp | rounded once |
| biases and factors with a logarithm or a power | {elementary} | {elementary} | rounded once |
| sums of 16 gates (FoX, CABLE, Wall) | {sums} | {sums} | rounded once |
| {of_largest} | {largest} | {largest} | rounded once |
| T5's buckets | equal | equal | equal |
| copied numbers | equal | equal | rounded once |

They hold up to position 2^24, for negative positions too, traced or not. "Rounded once" means
equal bit for bit to the float32 result, cast.
"""

FAMILIES = {  # by measure
    "bounded": "sines, cosines, embeddings, rotated vectors",
    "ulp": "ALiBi's biases",
    "elementary": "biases and factors with a logarithm or a power",
    "sum": "sums of 16 gates (FoX, CABLE, Wall)",
    "largest": "CARoPE, Sandwich, FIRE, FoPE, GRAPE-AP, PoPE, RePo, Wavelet, xPos",
    "copy": "T5's buckets and copied numbers",
}

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

READ = """## The data

`exactness.json` has, for each scheme:

| key | what |
| :-- | :-- |
| `unit`, `note` | the unit of its errors, and what was asked of it |
| `positions` | the worst over its options: dtype, range of positions, way |
| `options` | the worst over all ways and positions: option, dtype |
| `copied` | how many numbers, where the errors count wrong ones |

`python docs/exactness.py` measures again and writes both files; `--page-only` writes this page.
"""


def main() -> None:
    """Measure unless only the page is asked for, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page-only", action="store_true", help="write the page from the data")
    if not parser.parse_args().page_only:
        # As in pyproject.toml: the warning does not change the result.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        begin = time.perf_counter()
        DATA.write_text(dumped(data_of(measure_errors())), encoding="utf-8")
        print(f"docs/exactness.json: {time.perf_counter() - begin:.0f} s")
    PAGE.write_text(page(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")


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


def data_of(errors: Errors) -> dict[str, Any]:
    """What is kept of a measurement."""
    packages = [p for p in ("posenc", "numpy", "torch", "jax", "mpmath") if _is_installed(p)]
    runs = sum(len(set(DIGITS) & set(way.framework.dtypes)) for way in WAYS)
    kinds = dict.fromkeys(case.kind for case in CASES)
    return {
        "values": runs * sum(case.exact.high.size for case in CASES),
        "ways": [str(way) for way in WAYS],
        "versions": [
            f"python {platform.python_version()}",
            *(f"{p} {version(p)}" for p in packages),
        ],
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "schemes": {kind: scheme_data(errors, kind) for kind in kinds},
        "float32 product": product_data(errors),
    }


def scheme_data(errors: Errors, kind: str) -> dict[str, Any]:
    """The worst errors of one scheme: by dtype, range and way; by option and dtype."""
    cases = [case for case in CASES if case.kind == kind]
    copied = measure_of(kind) == "copy"
    dtypes = [dtype for dtype in DIGITS if any(dtype in way.framework.dtypes for way in WAYS)]
    data: dict[str, Any] = {"unit": MEASURES[measure_of(kind)]}
    if kind in NOTES:
        data["note"] = NOTES[kind]
    if copied:
        data["copied"] = sum(case.exact.high.size for case in cases)
    data["positions"] = {
        dtype: {
            name: {
                str(way): worst(errors, kind=kind, way=str(way), dtype=dtype, at=i)
                for way in WAYS
                if dtype in way.framework.dtypes
            }
            for i, name in enumerate(NAMES)
        }
        for dtype in dtypes
    }
    if len(cases) > 1:
        data["options"] = {
            case.option: {dtype: worst(errors, case=case, dtype=dtype) for dtype in dtypes}
            for case in cases
        }
    return data


def product_data(errors: Errors) -> dict[str, dict[str, float]]:
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
    return {
        name: {
            "posenc": float(f"{ours[i] * 2.0**-24:.1e}"),
            "float32 product": float(f"{np.max(off[i]):.1e}"),
        }
        for i, name in enumerate(NAMES)
    }


def dumped(data: dict[str, Any]) -> str:
    """JSON with one line for each row of numbers."""
    text = json.dumps(data, indent=1)
    row = re.compile(r"([{\[])\s+([^{}\[\]]*?)\s+([}\]])")
    return row.sub(lambda m: m[1] + re.sub(r"\n\s+", " ", m[2]) + m[3], text) + "\n"


def page(data: dict[str, Any]) -> str:
    """The page of a measurement."""
    return "\n".join([head(data), by_family(data), summary(data), product_section(data), READ])


def head(data: dict[str, Any]) -> str:
    """Conditions of the measurement, and the promises."""
    return HEAD.format(
        length=LENGTH,
        units=", ".join(f"2^-{digits} in {dtype}" for dtype, digits in DIGITS.items()),
        ways=", ".join(data["ways"]),
        versions=", ".join(data["versions"]),
        date=data["date"],
        values=data["values"],
        ulp64=LIMITS["ulp"]["float64"],
        ulp32=LIMITS["ulp"]["float32"],
        elementary=f"within {LIMITS['elementary']['float32']:.0f} ulp",
        sums=f"within {LIMITS['sum']['float32']:.0f} ulp",
        largest=f"within {LIMITS['largest']['float32']:.0f} spacings of the largest",
        of_largest=FAMILIES["largest"],
    )


def by_family(data: dict[str, Any]) -> str:
    """The worst of each family on each way, in the dtypes that are not one rounding of another."""
    rows = []
    for measure, name in FAMILIES.items():
        own = [s for kind, s in data["schemes"].items() if measure_of(kind) == measure]
        for dtype in ("float64", "float32"):
            ranges = [row for scheme in own for row in scheme["positions"][dtype].values()]
            cells = [
                cell(max((r[w] for r in ranges if w in r), default=None)) for w in data["ways"]
            ]
            rows.append([name, dtype, f"{LIMITS[measure][dtype]:.0f}", *cells])
    caption = (
        "The worst over all schemes, options and positions, in the unit of each scheme; 0 is no "
        "wrong value.\nfloat16 and bfloat16 are float32 rounded once: 0.50 at most."
    )
    names = ["family", "dtype", "promised", *data["ways"]]
    return "\n".join(["## By framework", "", caption, "", table(names, rows), ""])


def summary(data: dict[str, Any]) -> str:
    """The worst of each scheme in each dtype."""
    rows = []
    for kind, scheme in data["schemes"].items():
        count = sum if "copied" in scheme else max
        by_dtype = [
            count(value for row in ranges.values() for value in row.values()) if ranges else None
            for ranges in (scheme["positions"].get(dtype) for dtype in DIGITS)
        ]
        rows.append([kind, scheme["unit"], *map(cell, by_dtype)])
    caption = "The worst over all options, positions and ways."
    return "\n".join(["## Summary", "", caption, "", table(["scheme", "unit", *DIGITS], rows), ""])


def product_section(data: dict[str, Any]) -> str:
    """Exact angles against the angles of a float32 product."""
    rows = [
        [name, *(f"{row[column]:.1e}" for column in ("posenc", "float32 product"))]
        for name, row in data["float32 product"].items()
    ]
    names = ["positions up to", "posenc", "float32 product"]
    return "\n".join([PRODUCT, table(names, rows), ""])


def cell(value: float | None) -> str:
    """A number of the page: two digits, or a count."""
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


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
) -> float:
    """The worst error that fits the arguments, to two digits; the count for wrong values."""
    fit = [
        (c.measure, worst_of_ranges[at])
        for (c, w, d), worst_of_ranges in errors.items()
        if d == dtype and kind in (None, c.kind) and case in (None, c) and way in (None, w)
    ]
    if fit[0][0] == "copy":
        return sum(int(np.sum(values)) for _, values in fit)
    return round(max(float(np.max(values)) for _, values in fit), 2)


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
