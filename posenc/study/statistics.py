"""Statistics over seeds: intervals, paired differences, verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.study.results import before_finetuning

Records = Sequence[Mapping[str, Any]]  # one per run, as in results.jsonl
Summary = Mapping[str, Any]  # of a study, as in study.json
BySeed = Mapping[int, float]
BEFORE = ", before"  # fine-tuning; ends the label of a line
SORTED_FROM = 8  # schemes: so many are found by rank, fewer in the order in which they are named


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` seeds ± ``half_width``; ``lost`` further runs have no finite value.

    ``half_width`` is NaN for fewer than two seeds, ``mean`` for none.
    """

    mean: float
    half_width: float
    n: int
    lost: int = 0

    def text(self, sign: str = "") -> str:
        """``2.437 ± .009``, with a note of lost runs."""
        if not self.n:
            return "diverged" if self.lost else "–"
        value = f"{self.mean:{sign}.3f}"
        if self.n == 1:
            value += " (one seed)"
        else:
            value += f" ± {self.half_width:.3f}".replace(" 0.", " .")
        return f"{value} [{self.n} of {self.n + self.lost}]" if self.lost else value


@dataclass(frozen=True)
class Difference:
    """A mean paired difference, its corrected p value, and the verdict."""

    interval: Interval
    p: float
    verdict: str
    uncorrected: float = math.nan  # p as if it were the only test


@dataclass(frozen=True)
class Series:
    """One line of a plot, one row of a table: intervals by evaluation length.

    A scheme's other lines are those inside a window, and without the fine-tuning of the others.
    """

    label: str
    scheme: str
    windowed: bool
    points: Mapping[int, Interval]
    before_finetuning: bool = False

    @property
    def minor(self) -> bool:
        """Whether it is another line of a scheme."""
        return self.windowed or self.before_finetuning


def series(
    records: Records, key: str, schemes: Sequence[str] = (), level: float = 0.95
) -> list[Series]:
    """One line per scheme of the losses under ``key``: first ``schemes``, then the records' order.

    Under ``key="loss"``, a scheme that was also scored inside a window has a second line. A scheme
    that was fine-tuned has one without fine-tuning.
    """
    lines = []
    for scheme in dict.fromkeys([*schemes, *(r["scheme"] for r in records)]):
        own = [r for r in records if r["scheme"] == scheme]
        lines.append(Series(scheme, scheme, False, _points(own, key, level)))
        windows = {r["train_len"] for r in own if r.get("loss_windowed")}
        if key == "loss" and windows:
            label = f"{scheme}, window {min(windows)}"
            lines.append(Series(label, scheme, True, _points(own, "loss_windowed", level)))
        if any(key in record.get("before", ()) for record in own):
            without = [before_finetuning(record) for record in own]
            points = _points(without, key, level)
            lines.append(Series(f"{scheme}{BEFORE}", scheme, False, points, before_finetuning=True))
    return lines


def row_order(records: Records, summary: Summary | None = None) -> list[str]:
    """Schemes in the order of rows, lines and colours: as the study names them, or sorted.

    ``SORTED_FROM`` and more are sorted by the mean loss at the longest length of
    non-overlapping windows; those without one come last.
    """
    named = summary["config"]["schemes"] if summary else ()
    order = list(dict.fromkeys([*named, *(record["scheme"] for record in records)]))
    at = lengths(records, "loss")
    if len(order) < SORTED_FROM or not at:
        return order
    losses = losses_by_seed(records, "loss", at[-1])
    means = {name: mean_interval(losses.get(name, {}).values()).mean for name in order}
    return sorted(order, key=lambda name: math.inf if means[name] != means[name] else means[name])


def losses_by_seed(records: Records, key: str, length: int) -> dict[str, dict[int, float]]:
    """Losses at a length by scheme and seed: NaN for a failed run, no entry for a missing score."""
    table: dict[str, dict[int, float]] = {}
    seen: set[tuple[str, int]] = set()
    for record in records:
        scheme, seed = record["scheme"], record["seed"]
        if (scheme, seed) in seen:
            raise ValueError(
                f"records must have each scheme and seed once, got {scheme!r}, seed {seed} twice"
            )
        seen.add((scheme, seed))
        losses = table.setdefault(scheme, {})
        scores = record.get(key) or {}
        if record["status"] != "ok":
            losses[seed] = math.nan
        elif str(length) in scores:
            score = scores[str(length)]
            losses[seed] = math.nan if score is None else float(score)
    return table


def lengths(records: Records, key: str) -> list[int]:
    """The evaluation lengths that any run has under ``key``."""
    return sorted({int(length) for record in records for length in record.get(key) or ()})


def _points(own: Records, key: str, level: float) -> dict[int, Interval]:
    points = {}
    for length in lengths(own, key):
        (losses,) = losses_by_seed(own, key, length).values()
        # A seed without a score counts as lost where another seed has one.
        values = [losses.get(record["seed"], math.nan) for record in own]
        points[length] = mean_interval(values, level)
    return points


def mean_interval(values: Iterable[float], level: float = 0.95) -> Interval:
    """The mean and Student's interval; values that are not finite count as lost."""
    every = np.asarray(list(values), dtype=np.float64)
    kept = every[np.isfinite(every)]
    n, lost = int(kept.size), int(every.size - kept.size)
    if n < 2:
        return Interval(float(kept[0]) if n else math.nan, math.nan, n, lost)
    half = t_quantile(level, n - 1) * float(kept.std(ddof=1)) / math.sqrt(n)
    return Interval(float(kept.mean()), half, n, lost)


def paired_differences(
    table: Mapping[str, BySeed], baseline: str, level: float = 0.95
) -> dict[str, Difference]:
    """Each scheme minus ``baseline``, seed by seed.

    Parameters
    ----------
    table
        Losses by scheme and seed. A pair needs two finite losses, else it counts as lost.

    Returns
    -------
    A ``Difference`` by scheme, without the baseline. The p values are two-sided, with Holm's
    correction over all schemes. The verdict is ``"better"`` (lower), ``"worse"``, ``"tie"`` (p at
    or above ``1 - level``), ``"one seed"`` or ``"no pair"``.
    """
    if baseline not in table:
        raise ValueError(f"baseline must be in the table, got {baseline!r}; has {list(table)}")
    against = table[baseline]
    pairs = {
        scheme: [
            losses.get(seed, math.nan) - against.get(seed, math.nan)
            for seed in sorted(losses.keys() | against.keys())
        ]
        for scheme, losses in table.items()
        if scheme != baseline
    }
    return judge(pairs, level)


def judge(differences: Mapping[str, Sequence[float]], level: float = 0.95) -> dict[str, Difference]:
    """A verdict on each row of differences; all rows are one family of tests."""
    raw = {name: _p_value(values) for name, values in differences.items()}
    corrected = holm(raw)
    results = {}
    for name, values in differences.items():
        interval = mean_interval(values, level)
        verdict = _verdict(interval, corrected[name], level)
        results[name] = Difference(interval, corrected[name], verdict, raw[name])
    return results


def seeds_needed(difference: Difference, tests: int, level: float = 0.95) -> int | None:
    """Seeds for a verdict if the mean and the spread stay as they are; None above 99, or if equal.

    ``tests`` is the size of the family: the smallest p of a family is multiplied by it.
    """
    interval = difference.interval
    if interval.n < 2 or not interval.mean:
        return None
    spread = interval.half_width * math.sqrt(interval.n) / t_quantile(level, interval.n - 1)
    for n in range(interval.n + 1, 100):
        if abs(interval.mean) * math.sqrt(n) > spread * t_quantile(1 - (1 - level) / tests, n - 1):
            return n
    return None


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction; NaN does not count as a test, and stays NaN."""
    tested = sorted((name for name, p in p_values.items() if p == p), key=lambda n: p_values[n])
    corrected, largest = dict(p_values), 0.0
    for rank, name in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p_values[name]))
        corrected[name] = largest
    return corrected


def t_quantile(level: float, df: int) -> float:
    """The ``t`` that holds ``|T| <= t`` with probability ``level``."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level!r}")
    # Bisecting the angle keeps every t, however large, in a bounded range.
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        below = t_within(math.tan(middle) * math.sqrt(df), df) < level
        low, high = (middle, high) if below else (low, middle)
    return math.tan(low) * math.sqrt(df)


def t_within(t: float, df: int) -> float:
    """``P(|T| <= t)``, Abramowitz and Stegun 26.7.3 and 26.7.4, for ``df = 1, 2, ...``."""
    angle = math.atan2(t, math.sqrt(df))
    cosine, odd = math.cos(angle), df % 2
    term = total = cosine if odd else 1.0
    for k in range(1 + odd, df - 2, 2):
        term *= cosine * cosine * k / (k + 1)
        total += term
    if not odd:
        return math.sin(angle) * total
    return (angle + (math.sin(angle) * total if df > 1 else 0.0)) * 2 / math.pi


def _p_value(differences: Sequence[float]) -> float:
    kept = np.asarray(differences, dtype=np.float64)
    kept = kept[np.isfinite(kept)]
    if kept.size < 2:
        return math.nan
    mean, error = float(kept.mean()), float(kept.std(ddof=1)) / math.sqrt(kept.size)
    if not error:
        return 0.0 if mean else 1.0
    return 1 - t_within(abs(mean) / error, int(kept.size) - 1)


def _verdict(interval: Interval, p: float, level: float) -> str:
    if interval.n < 2:
        return "one seed" if interval.n else "no pair"
    if p >= 1 - level:
        return "tie"
    return "better" if interval.mean < 0 else "worse"
