"""What asv measured, as a table of figures over commits for each benchmark."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asv.benchmarks import Benchmarks
from asv.config import Config
from asv.results import Results
from asv.util import human_value


@dataclass(frozen=True)
class Figure:
    """A benchmark at one choice of its params, in the commits where it was measured.

    Attributes
    ----------
    values
        Commit -> value, oldest first. None where it failed, NaN where it does not apply.
    stats
        Commit -> asv's statistics of the samples, or None.
    unit
        Unit of asv: ``seconds``, ``bytes``, or that of a ``track_`` benchmark.
    """

    values: Mapping[str, float | None]
    stats: Mapping[str, Mapping[str, float] | None]
    unit: str

    def applies(self, commit: str) -> bool:
        value = self.values.get(commit, math.nan)
        return value is None or not math.isnan(value)

    def number(self, commit: str) -> float:
        """The value; NaN where there is none."""
        value = self.values.get(commit)
        return math.nan if value is None else value

    def text(self, commit: str) -> str:
        value = self.number(commit)
        if self.unit not in ("seconds", "bytes"):
            return "n/a" if math.isnan(value) else f"{value:.3g}"
        number, unit = re.fullmatch(r"([\d.]*)(.*)", human_value(value, self.unit)).groups()
        unit = unit.strip() + "B" * (number != "" and self.unit == "bytes")
        return "\u00a0".join(filter(None, (number, unit)))


@dataclass(frozen=True)
class Benchmark:
    """A figure for each combination of params, in asv's order."""

    name: str
    params: Mapping[str, Sequence[str]]
    figures: Mapping[tuple[str, ...], Figure]
    unit: str

    def applies(self, commit: str) -> bool:
        return any(one.applies(commit) for one in self.figures.values())

    def failed(self, commit: str) -> bool:
        return any(one.values.get(commit, math.nan) is None for one in self.figures.values())


def load(conf: Config, history: Sequence[Results]) -> list[Benchmark]:
    """Every benchmark that the suite has now, with the history of its present version."""
    return [_benchmark(one, history) for _, one in sorted(Benchmarks.load(conf).items())]


def _benchmark(described: Mapping[str, Any], history: Sequence[Results]) -> Benchmark:
    name, params = described["name"], described["params"]
    own = [one for one in history if name in one.get_result_keys({name: described})]
    values = {one.commit_hash: one.get_result_value(name, params) for one in own}
    stats = {one.commit_hash: one.get_result_stats(name, params) for one in own}
    named = {name: [_plain(param) for param in some] for name, some in _pairs(described)}
    figures = {
        choice: Figure(
            {commit: row[index] for commit, row in values.items()},
            {commit: row[index] for commit, row in stats.items()},
            described["unit"],
        )
        for index, choice in enumerate(itertools.product(*named.values()))
    }
    return Benchmark(name, named, figures, described["unit"])


def _pairs(described: Mapping[str, Any]) -> zip[tuple[str, list[str]]]:
    return zip(described["param_names"], described["params"], strict=True)


def _plain(param: str) -> str:
    """A param as text: asv stores its ``repr``."""
    return param.strip("'")
