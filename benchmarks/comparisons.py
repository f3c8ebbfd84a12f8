"""What the page draws: ratios, exponents, errors."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from charts import Chart
from figures import Benchmark
from harness.clock import Speed

# The class that a module's other classes are compared with, if it has one.
_BASELINE = "WithoutPositions"


def ratios(benchmarks: Sequence[Benchmark], commit: str) -> list[Chart]:
    """Time of each implementation over that of its framework's own attention without positions.

    A class is compared with ``WithoutPositions`` of its module, at the same length. The class's
    name is the stage: ``TrainingStep`` -> ``training step``.
    """
    baselines = {_module(one): one for one in benchmarks if _class(one) == _BASELINE}
    charts = []
    for one in benchmarks:
        baseline = baselines.get(_module(one))
        if baseline and one is not baseline:
            charts += _ratios(one, baseline, commit)
    return charts


def drift(benchmarks: Sequence[Benchmark], commit: str) -> dict[str, float]:
    """How much longer than at each other commit the frameworks' own attention took: the machine.

    The median over ``WithoutPositions``; 1 where it was not measured.
    """
    figures = [
        figure for one in benchmarks if _class(one) == _BASELINE for figure in one.figures.values()
    ]
    found = {}
    for other in {other for figure in figures for other in figure.values}:
        both = [(figure.number(commit), figure.number(other)) for figure in figures]
        known = [now / then for now, then in both if now > 0 and then > 0]  # NaN is not
        found[other] = statistics.median(known) if known else 1.0
    return found


def _ratios(one: Benchmark, baseline: Benchmark, commit: str) -> Iterator[Chart]:
    stage = re.sub(r"(?<!^)(?=[A-Z])", " ", _class(one)).lower()
    panels: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(_rows)
    for choice, figure in one.figures.items():
        at = dict(zip(one.params, choice, strict=True))
        framework, _, name = at["implementation"].partition(" ")
        below = baseline.figures.get((framework, stage, at["length"]))
        if below:
            ratio = figure.number(commit) / below.number(commit)
            panels[framework, at["length"]][at["scheme"]][name] = ratio
    for (framework, length), rows in panels.items():
        yield Chart(f"{_module(one)}, {framework}, {stage}, length {length}", rows, 1.0)


def exponents(benchmarks: Sequence[Benchmark], commit: str) -> list[Chart]:
    """How costs grow with the length; a chart compares implementations."""
    return _of_unit("exponent", "implementation", "stage", benchmarks, commit, 1.0, log=False)


def errors(benchmarks: Sequence[Benchmark], commit: str) -> list[Chart]:
    """Errors in spacings; a chart compares schemes."""
    return _of_unit("spacings", "scheme", "framework", benchmarks, commit, 0.5)


def _of_unit(
    unit: str,
    row: str,
    series: str,
    benchmarks: Sequence[Benchmark],
    commit: str,
    line: float,
    *,
    log: bool = True,
) -> list[Chart]:
    """A chart for each benchmark of the unit and each choice of its other params."""
    charts = []
    for one in (one for one in benchmarks if one.unit == unit):
        panels: dict[tuple[str, ...], dict[str, dict[str, float]]] = defaultdict(_rows)
        for choice, figure in one.figures.items():
            at = dict(zip(one.params, choice, strict=True))
            panel = tuple(f"{name} {at[name]}" for name in at if name not in (row, series))
            panels[panel][at[row]][at[series]] = figure.number(commit)
        charts += [
            Chart(", ".join((one.name, *panel)), rows, line, log) for panel, rows in panels.items()
        ]
    return charts


def peers(result: Path) -> list[Chart]:
    """Time of posenc over that of each library that ``peers.py`` measured, if it did.

    A library with several ways to the same result counts with its fastest.
    """
    if not result.exists():
        return []
    panels: dict[tuple[str, ...], dict[str, dict[str, float]]] = defaultdict(_rows)
    for row in json.loads(result.read_text(encoding="utf-8"))["rows"]:
        if "ratio" in row:
            panel = row["stage"], row["pass"], row["mode"]
            of_scheme, ratio = panels[panel][row["scheme"]], Speed.read(row["ratio"]).median
            of_scheme[row["library"]] = max(ratio, of_scheme.get(row["library"], ratio))
    return [Chart(", ".join(panel), rows, 1.0) for panel, rows in panels.items()]


def _rows() -> dict[str, dict[str, float]]:
    return defaultdict(dict)


def _module(one: Benchmark) -> str:
    return one.name.split(".")[0]


def _class(one: Benchmark) -> str:
    return one.name.split(".")[-2]
