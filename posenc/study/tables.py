"""The tables of a study: losses, to which length they hold, costs, and how training went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from posenc.study.captions import (
    PROTOCOLS,
    caption,
    failures,
    first_runs,
    length_label,
    protocol_title,
    settings,
)
from posenc.study.differences import baseline
from posenc.study.effective import NOLIMA, effective_length
from posenc.study.history import mean_norm
from posenc.study.outcomes import texts
from posenc.study.statistics import Interval, Records, Series, Summary, lengths, row_order, series
from posenc.study.table import Table, escape_markdown, wrap

_STABILITY = (
    "How smoothly each scheme trained: norms of gradients before clipping, and steps whose loss "
    "lies above the median of the 100 before by more than 7 robust deviations and 0.1 bits."
)
_COST = (
    "Over the successful runs, as timed on this machine; seconds are medians. Other work on the "
    "machine slows some runs down more than others."
)
Studies = Sequence[tuple[Summary, Records]]  # of text, one per training length


def table_text(summary: Summary, records: Records, width: int | None = None) -> str:
    """For a terminal: the losses of both protocols, the study's settings, the failures."""
    studies = texts(summary, records)
    tables = [table.text(width) for table in _all_tables(studies)]
    first, *notes = (wrap(line, width) for line in _notes(studies))
    return "\n\n".join([first, *tables, *notes])


def table_markdown(summary: Summary, records: Records) -> str:
    """The content of ``table_text`` in Markdown."""
    studies = texts(summary, records)
    tables = [table.markdown() for table in _all_tables(studies)]
    first, *notes = _notes(studies)
    return "\n\n".join([first, *tables, *map(escape_markdown, notes)])


def _all_tables(studies: Studies) -> list[Table]:
    holds = [holds_table(*each) for each in studies]
    return [*loss_tables(*_together(studies)), *(table for table in holds if table)]


def _together(studies: Studies) -> tuple[Summary, Records]:
    return studies[0] if len(studies) == 1 else several_lengths(studies)


def _notes(studies: Studies) -> list[str]:
    """The caption, then what the study set and what failed, each once."""
    lines = [line for own, records in studies for line in settings(own, records)]
    lines += [line for _, records in studies for line in failures(records)]
    own, records = _together(studies)
    return [caption(records, own), *dict.fromkeys(lines)]


def several_lengths(studies: Studies) -> tuple[Summary, Records]:
    """Studies of several training lengths as one, whose schemes are named with their length."""
    first = studies[0][0]["config"]
    lengths = [own["config"]["train_len"] for own, _ in studies]
    names = [_trained_at(scheme, n) for scheme in first["schemes"] for n in lengths]
    config = {**first, "schemes": names, "train_len": None}
    renamed = [
        {**record, "scheme": _trained_at(record["scheme"], length)}
        for length, (_, records) in zip(lengths, studies, strict=True)
        for record in records
    ]
    return {**studies[0][0], "config": config}, renamed


def _trained_at(scheme: str, length: int) -> str:
    return f"{scheme}, trained at {length}"


def loss_tables(summary: Summary, records: Records) -> list[Table]:
    """One table per protocol that was scored."""
    tables = [_loss_table(summary, records, protocol) for protocol in PROTOCOLS]
    return [table for table in tables if table is not None]


def _loss_table(summary: Summary, records: Records, protocol: str) -> Table | None:
    at = lengths(records, protocol)
    if not at and protocol != "loss":
        return None
    rows: list[Sequence[str]] = []
    minor: set[int] = set()
    for line in series(records, protocol, row_order(records, summary)):
        runs = [record for record in records if record["scheme"] == line.scheme]
        cells = [_cell(line.points.get(length), runs, records) for length in at]
        if line.minor:
            minor.add(len(rows))
        rows.append((line.label, *cells))
    heads = [length_label(length, summary["config"]["train_len"]) for length in at]
    lines = series(records, protocol, row_order(records, summary))
    title = protocol_title(protocol, records)
    return Table(title, ["scheme", *heads], rows, frozenset(minor), lowest(lines, at))


def lowest(lines: Sequence[Series], at: Sequence[int]) -> frozenset[tuple[int, int]]:
    """Row and column of the lowest mean of each column; none in a table of one row."""
    found = set()
    for column, length in enumerate(at, 1):
        means = {
            row: line.points[length].mean
            for row, line in enumerate(lines)
            if length in line.points and line.points[length].n
        }
        if len(means) > 1:
            found.add((min(means, key=means.__getitem__), column))
    return frozenset(found)


def holds_table(summary: Summary, records: Records) -> Table | None:
    """To which length the loss of non-overlapping windows holds, by two definitions."""
    name, trained = baseline(summary), summary["config"]["train_len"]
    own = [r["loss_by_stretch"].get(str(trained)) for r in records if _has_stretches(r, name)]
    # Of the stretches, whose losses are rounded: the baseline holds at its own training length.
    least = [np.array(each) for each in own if each]
    rows = []
    for scheme in row_order(records, summary):
        runs = [r["loss_by_stretch"] for r in records if _has_stretches(r, scheme)]
        if not runs or not least or not all(own):
            continue
        by_length = {
            int(n): [np.array(run[n]) for run in runs] for n in runs[0] if int(n) >= trained
        }
        found = [
            effective_length(by_length, least=at, lower=True, same_texts=True)
            for at in (least, None)
        ]
        rows.append((scheme, *(one.text() if one else "–" for one in found)))
    if not rows:
        return None
    limit = float(np.mean([each.mean() for each in least]))
    caption = (
        f"To which length the loss holds: RULER, at most {limit:.3f}, the loss of {name} at the "
        f"training length; NoLiMa, at most the scheme's own loss there divided by {NOLIMA}. "
        "Intervals are over seeds and stretches of text."
    )
    return Table(caption, ["scheme", "RULER", "NoLiMa"], rows)


def _has_stretches(record: Mapping[str, Any], scheme: str) -> bool:
    return record["scheme"] == scheme and bool(record.get("loss_by_stretch"))


def cost_table(summary: Summary, records: Records) -> Table:
    """Parameters, speed and time of each scheme over its seeds."""
    rows, tuned = [], any(record.get("finetune") for record in records)
    for name, first in first_runs(summary, records).items():
        runs = [r for r in records if r["scheme"] == name and r["status"] == "ok"]
        params = first["params"]
        share = f"{params['position']:,}"
        if params["position"]:
            share += f" ({params['position'] / params['total']:.1%})"
        speeds = [_over_runs(runs, "tokens_per_second", of, ",.0f") for of in (min, median)]
        seconds = [_over_runs(runs, f"{of}_seconds", median, ".1f") for of in ("train", "eval")]
        tuning = [run["finetune"] for run in runs if run.get("finetune")]
        seconds += [_over_runs(tuning, "seconds", median, ".1f")] * bool(tuned)
        rows.append((name, f"{params['total']:,}", share, *speeds, *seconds))
    columns = ["scheme", "parameters", "of the scheme", "tokens/s, min", "tokens/s, median"]
    columns += ["training, s", "evaluation, s", *["fine-tuning, s"] * bool(tuned)]
    return Table(_COST, columns, rows)


def stability_table(summary: Summary, records: Records) -> Table | None:
    """Norms of gradients and spikes of the loss, of each scheme over its seeds; None without."""
    rows = []
    for name in first_runs(summary, records):
        runs = [r for r in records if r["scheme"] == name and r["status"] == "ok"]
        told = [r for r in runs if r.get("gradient_norms")]
        if told:
            norms = median(mean_norm(r["gradient_norms"]) for r in told)
            largest = max(chunk[2] for r in told for chunk in r["gradient_norms"])
            clipped = sum(r["clipped"] for r in told) / sum(r["steps"] for r in told)
            with_spikes = sum(r["spikes"] > 0 for r in runs)
            spikes = f"{sum(r['spikes'] for r in runs)} in {with_spikes} of {len(runs)} runs"
            rows.append((name, f"{norms:.3g}", f"{largest:.3g}", f"{clipped:.0%}", spikes))
    columns = ["scheme", "norm, median run", "norm, largest", "steps clipped", "spikes"]
    return Table(_STABILITY, columns, rows) if rows else None


def _cell(interval: Interval | None, runs: Records, records: Records) -> str:
    if interval is None:
        return "–" if any(run["status"] == "ok" for run in runs) else "failed" if runs else "no run"
    if len({record["seed"] for record in records}) == 1 and interval.n:
        return f"{interval.mean:.3f}"  # the caption already says "one seed"
    return interval.text()


def _over_runs(runs: Records, key: str, of: Callable[[list[float]], float], form: str) -> str:
    values = [run[key] for run in runs if run.get(key) is not None]
    return f"{of(values):{form}}" if values else "–"
