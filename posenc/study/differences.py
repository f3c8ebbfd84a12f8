"""Each scheme against the baseline, and against itself at another length, with verdicts."""

from __future__ import annotations

import math

from posenc.study.captions import PROTOCOLS, length_label
from posenc.study.results import worded
from posenc.study.statistics import (
    Difference,
    Records,
    Summary,
    judge,
    lengths,
    losses_by_seed,
    paired_differences,
    row_order,
    series,
)
from posenc.study.table import Table

GROWTH = {"better": "falls", "worse": "rises"}


def difference_tables(summary: Summary, records: Records) -> list[Table]:
    """Each scheme against the baseline at the training length and at the longest."""
    tables = []
    for protocol, title in PROTOCOLS.items():
        ends = end_lengths(summary, records, protocol)
        by_length = [differences(summary, records, protocol, length) for length in ends]
        columns, train_len = ["scheme"], summary["config"]["train_len"]
        for length in ends:
            columns += [f"at {length_label(length, train_len)}", "p", "verdict"]
        rows = [
            (name, *(cell for one in by_length for cell in _verdict_cells(one.get(name))))
            for name in dict.fromkeys(name for one in reversed(by_length) for name in one)
        ]
        if rows:
            tables.append(Table(worded(title, records), columns, rows))
    return tables


def differences(
    summary: Summary, records: Records, protocol: str, length: int
) -> dict[str, Difference]:
    """Verdicts against the baseline; beyond the training length they include windowed rows."""
    losses = losses_by_seed(records, protocol, length)
    windowed = losses_by_seed(records, "loss_windowed", length)
    table = {}
    for line in series(records, protocol, row_order(records, summary)):
        beyond = length > summary["config"]["train_len"]
        own = (windowed if line.windowed else losses).get(line.scheme)
        if own and not line.before_finetuning and (beyond or not line.windowed):
            table[line.label] = own
    name = baseline(summary)
    return paired_differences(table, name) if name in table else {}


def growth(summary: Summary, records: Records, protocol: str) -> dict[str, Difference]:
    """Each scheme's loss at the longest length minus its own at the training length."""
    ends = end_lengths(summary, records, protocol)
    if len(ends) < 2:
        return {}
    short, long = (losses_by_seed(records, protocol, length) for length in ends)
    pairs = {}
    for name in row_order(records, summary):
        start, end = short.get(name), long.get(name)
        if start and end:
            seeds = sorted(start.keys() | end.keys())
            pairs[name] = [end.get(s, math.nan) - start.get(s, math.nan) for s in seeds]
    return judge(pairs)


def growth_table(summary: Summary, records: Records, protocol: str) -> Table | None:
    """``growth`` as a table, with verdicts rises, falls, or tie."""
    ends = end_lengths(summary, records, protocol)
    rows = []
    for name, difference in growth(summary, records, protocol).items():
        change, p, verdict = _verdict_cells(difference)
        rows.append((name, change, p, GROWTH.get(verdict, verdict)))
    title = f"Each scheme against itself, from {' to '.join(map(str, ends))} bytes of context"
    title = worded(title, records)
    return Table(title, ["scheme", "change", "p", "verdict"], rows) if rows else None


def baseline(summary: Summary) -> str:
    """The scheme that the others are compared with."""
    return str(summary["config"].get("baseline") or summary["config"]["schemes"][0])


def main_protocol(summary: Summary, records: Records) -> str:
    """Same targets where they were scored: this protocol shows the effect of a longer context."""
    scored = end_lengths(summary, records, "loss_same_targets")
    return "loss_same_targets" if scored else "loss"


def end_lengths(summary: Summary, records: Records, protocol: str) -> list[int]:
    """The training length, or else the shortest length, and the longest length."""
    at = lengths(records, protocol)
    trained = summary["config"]["train_len"]
    return sorted({trained if trained in at else at[0], at[-1]}) if at else []


def _verdict_cells(difference: Difference | None) -> tuple[str, str, str]:
    if difference is None or not difference.interval.n:
        return "–", "–", difference.verdict if difference else "–"
    p = difference.p
    shown = "–" if p != p else "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0")
    return difference.interval.text("+"), shown, difference.verdict
