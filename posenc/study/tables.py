"""The tables of a study, for the terminal, for Markdown and for HTML."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from posenc.study.columns import align
from posenc.study.effective import NOLIMA, effective_length
from posenc.study.history import mean_norm
from posenc.study.outcomes import texts
from posenc.study.results import worded
from posenc.study.statistics import (
    BEFORE,
    SORTED_FROM,
    Difference,
    Interval,
    Records,
    Series,
    Summary,
    judge,
    lengths,
    losses_by_seed,
    paired_differences,
    row_order,
    series,
)

PROTOCOLS = {
    "loss": "Non-overlapping windows: the same bytes, cut again for each length",
    "loss_same_targets": "Same targets: the same last bytes of each window, after a longer context",
    "loss_sliding": "Sliding windows: each starts a stride after the one before, and only targets "
    "that are new in it count",
    "loss_key_bytes": "Key bytes: those of non-overlapping windows that only a repeat further back "
    "than the training length predicts",
}
GROWTH = {"better": "falls", "worse": "rises"}
_STABILITY = (
    "How smoothly each scheme trained: norms of gradients before clipping, and steps whose loss "
    "lies above the median of the 100 before by more than 7 robust deviations and 0.1 bits."
)
_COST = (
    "Over the successful runs, as timed on this machine; seconds are medians. Other work on the "
    "machine slows some runs down more than others."
)


@dataclass(frozen=True)
class Table:
    """A caption, a header and rows of text.

    ``minor`` rows belong to the row above them; ``best`` cells, row and column, are bold; ``wrong``
    ones are red.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    minor: frozenset[int] = frozenset()
    best: frozenset[tuple[int, int]] = frozenset()
    wrong: frozenset[tuple[int, int]] = frozenset()

    def text(self, width: int | None = None) -> str:
        """Aligned columns under the caption, in lines of at most ``width`` where possible."""
        return f"{wrap(self.caption, width)}\n\n{align([self.columns, *self.rows], width)}"

    def markdown(self) -> str:
        """A pipe table under the caption."""
        rule = [":--", *["--:"] * (len(self.columns) - 1)]
        lines = [
            map(escape_markdown, self.columns),
            rule,
            *([self._marked(r, c) for c in range(len(row))] for r, row in enumerate(self.rows)),
        ]
        return "\n".join(
            [f"{escape_markdown(self.caption)}", "", *(f"| {' | '.join(ln)} |" for ln in lines)]
        )

    def html(self) -> str:
        """A ``<table>`` with all text escaped."""
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        marks = [
            [
                (place in self.best, place in self.wrong)
                for place in ((r, c) for c in range(len(row)))
            ]
            for r, row in enumerate(self.rows)
        ]
        body = "".join(
            _html_row(row, index in self.minor, marks[index]) for index, row in enumerate(self.rows)
        )
        return (
            f'<div class="scroll"><table><caption>{html.escape(self.caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _marked(self, row: int, column: int) -> str:
        text = escape_markdown(self.rows[row][column])
        return f"**{text}**" if (row, column) in self.best | self.wrong else text


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


def settings(summary: Summary, records: Records) -> list[str]:
    """What the rows do not say: options set by the study, a learning rate, shared trainings."""
    config = summary["config"]
    fitted = [
        f"{name} is built with {options}" for name, options in summary.get("fitted", {}).items()
    ]
    lines = (
        [f"Set by the study to suit the training length: {'; '.join(fitted)}."] if fitted else []
    )
    learned = [
        name for name, run in _first_runs(summary, records).items() if run["params"]["position"]
    ]
    if learned and "position_lr_scale" in config and "position_lr_scale" not in tuned(summary):
        rate = config["position_lr_scale"]
        scale = "the learning rate" if rate == 1 else f"{rate:g} times the learning rate"
        lines.append(
            f"Learned position params ({', '.join(learned)}) have {scale} of the other weights."
        )
    lines += [
        f"Trained once as {name}, then tested as each: {', '.join(labels)}."
        for name, labels in _shared_trainings(summary, records).items()
    ]
    if reach := config.get("random_positions"):
        lines.append(f"Trained at positions drawn from 0 .. {reach - 1}, tested at 0, 1, 2, ...")
    if reach := config.get("random_float_positions"):
        lines.append(
            f"Trained at real positions drawn from 0 to {reach}, tested at tokens spread evenly "
            "over them."
        )
    if stride := config.get("stride"):
        lines.append(worded(f"Sliding windows advance by {stride} bytes.", records))
    return [*lines, *finetuning(summary, records)]


def finetuning(summary: Summary, records: Records) -> list[str]:
    """How all schemes were fine-tuned, and which of them did not change; empty if none was."""
    tuned = [record for record in records if record.get("finetune")]
    if not tuned:
        return []
    facts = tuned[0]["finetune"]
    order = row_order(records, summary)
    plain = {r["scheme"] for r in tuned if r["tested_schemes"] is None}
    same = [name for name in order if name in plain]
    alike = f", {', '.join(same)} too, tested as trained" if same else ""
    return [
        f"Every scheme was fine-tuned after its change{alike}: {facts['steps']} steps of "
        f"{facts['batch_size']} x {facts['len']}, peak learning rate {facts['learning_rate']:g}, "
        "on the same data for all schemes of a seed. Rows that end in "
        f"{BEFORE.strip(', ')!r} are the same models before."
    ]


def _shared_trainings(summary: Summary, records: Records) -> dict[str, list[str]]:
    """Labels that share a training with another label, by the label of the training."""
    by_training: dict[str, set[str]] = {}
    trained_as: dict[str, str] = {}
    for record in records:
        if "training" in record:
            by_training.setdefault(record["training"], set()).add(record["scheme"])
            trained_as[record["scheme"]] = record["trained_as"]
    shared = {label for labels in by_training.values() if len(labels) > 1 for label in labels}
    found: dict[str, list[str]] = {}
    for label in filter(shared.__contains__, row_order(records, summary)):
        found.setdefault(trained_as[label], []).append(label)
    return found


def schemes_as_built(summary: Summary, records: Records) -> dict[str, str]:
    """Each scheme as built, layer by layer where layers differ; ``@512`` is a window."""
    shown = {}
    for name, run in _first_runs(summary, records).items():
        trained = _layers(run.get("schemes"), run.get("windows"))
        tested = _layers(run.get("tested_schemes"), run.get("tested_windows"))
        shown[name] = f"{trained}; tested as {tested}" if tested else trained
    return {name: text for name, text in shown.items() if text}


def _layers(schemes: Sequence[str] | None, windows: Sequence[int | None] | None) -> str:
    schemes = schemes or ()
    layers = [
        f"{scheme}@{window}" if window else scheme
        for scheme, window in zip(schemes, windows or (None,) * len(schemes), strict=True)
    ]
    kinds = list(dict.fromkeys(layers))
    return ", ".join(kinds if len(kinds) < 2 else layers)


def _first_runs(summary: Summary, records: Records) -> dict[str, Mapping[str, Any]]:
    """The first successful run of each scheme, in the order of the study."""
    order = row_order(records, summary)
    runs = {r["scheme"]: r for r in reversed(records) if r["status"] == "ok"}
    return {name: runs[name] for name in order if name in runs}


def caption(records: Records, summary: Summary | None = None) -> str:
    """The unit of the loss tables, the meaning of an entry, and whether the runs are tuned."""
    seeds = len({record["seed"] for record in records})
    entry = (
        f"mean ± half the 95 % interval over {seeds} seeds"
        if seeds > 1
        else "one seed, no interval"
    )
    tuned = next((r["finetune"] for r in records if r.get("finetune")), None)
    if tuned:
        entry += f"; after fine-tuning of {tuned['steps']} steps at length {tuned['len']}, rows "
        entry += f"that end in {BEFORE.strip(', ')!r} without it"
    note = " [2 of 3]: of 3 runs, 2 have a finite loss." if has_lost_runs(records) else ""
    if len({record["scheme"] for record in records}) >= SORTED_FROM:
        note += " Rows are sorted by the loss at the longest length of non-overlapping windows."
    tuned = f" {said}" if summary and (said := tuned_caption(summary)) else ""
    return worded(f"Bits per byte, lower is better; {entry}.", records) + f"{tuned}{note}"


def tuned(summary: Summary) -> list[str]:
    """The options that a sweep chose for each scheme."""
    schemes = summary.get("tuning", {}).get("schemes", ())
    return list(dict.fromkeys(name for one in schemes for name in one["grid"]))


def tuned_caption(summary: Summary) -> str:
    """What a table of results says of its runs; empty without a sweep."""
    names = " and ".join(tuned(summary))
    return f"Tuned runs: each scheme has the {names} chosen for it." if names else ""


def has_lost_runs(records: Records) -> bool:
    """Whether a run failed, or has a loss that is not finite."""
    return any(
        point.lost
        for protocol in PROTOCOLS
        for line in series(records, protocol)
        for point in line.points.values()
    ) or bool(failures(records))


def failures(records: Records) -> list[str]:
    """One line per scheme and message of failed runs."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["status"] != "ok":
            what = record["scheme"], record.get("error") or "no message"
            seeds.setdefault(what, []).append(str(record["seed"]))
    return [
        f"failed: {scheme}, seed{'s' * (len(of) > 1)} {', '.join(of)}: {message}"
        for (scheme, message), of in seeds.items()
    ]


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
    title = worded(PROTOCOLS[protocol], records)
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
    least = float(np.mean([np.mean(each) for each in own])) if own and all(own) else math.nan
    rows = []
    for scheme in row_order(records, summary):
        runs = [r["loss_by_stretch"] for r in records if _has_stretches(r, scheme)]
        if not runs or least != least:
            continue
        by_length = {
            int(n): [np.array(run[n]) for run in runs] for n in runs[0] if int(n) >= trained
        }
        found = [effective_length(by_length, least=at, lower=True) for at in (least, None)]
        rows.append((scheme, *(one.text() if one else "–" for one in found)))
    caption = (
        f"To which length the loss holds: RULER, at most {least:.3f}, the loss of {name} at the "
        f"training length; NoLiMa, at most the scheme's own loss there divided by {NOLIMA}. "
        "Intervals are over seeds and stretches of text."
    )
    return Table(caption, ["scheme", "RULER", "NoLiMa"], rows) if rows else None


def _has_stretches(record: Mapping[str, Any], scheme: str) -> bool:
    return record["scheme"] == scheme and bool(record.get("loss_by_stretch"))


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


def cost_table(summary: Summary, records: Records) -> Table:
    """Parameters, speed and time of each scheme over its seeds."""
    rows, tuned = [], any(record.get("finetune") for record in records)
    for name, first in _first_runs(summary, records).items():
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
    for name in _first_runs(summary, records):
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


def length_label(length: int, train_len: int | None) -> str:
    """``1024 (16x)``; without the factor where rows differ in their training length."""
    return f"{length}" if train_len is None else f"{length} ({length / train_len:g}x)"


def _cell(interval: Interval | None, runs: Records, records: Records) -> str:
    if interval is None:
        return "–" if any(run["status"] == "ok" for run in runs) else "failed" if runs else "no run"
    if len({record["seed"] for record in records}) == 1 and interval.n:
        return f"{interval.mean:.3f}"  # the caption already says "one seed"
    return interval.text()


def _verdict_cells(difference: Difference | None) -> tuple[str, str, str]:
    if difference is None or not difference.interval.n:
        return "–", "–", difference.verdict if difference else "–"
    p = difference.p
    shown = "–" if p != p else "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0")
    return difference.interval.text("+"), shown, difference.verdict


def _over_runs(runs: Records, key: str, of: Callable[[list[float]], float], form: str) -> str:
    values = [run[key] for run in runs if run.get(key) is not None]
    return f"{of(values):{form}}" if values else "–"


def wrap(text: str, width: int | None) -> str:
    """The text in lines of ``width``; longer words, such as paths, stay whole."""
    if width is None:
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def escape_markdown(cell: str) -> str:
    """Text that neither ends its column nor becomes HTML."""
    return html.escape(cell, quote=False).replace("|", r"\|").replace("\n", " ")


def _html_row(row: Sequence[str], minor: bool, marks: Sequence[tuple[bool, bool]]) -> str:
    cells = []
    for cell, (is_best, is_wrong) in zip(row[1:], marks[1:], strict=True):
        shown = html.escape(cell)
        named = cell if cell in {"better", "worse", "tie", "rises", "falls"} else ""
        named = "wrong" if is_wrong else named
        css_class = f' class="{named}"' if named else ""
        shown = shown.replace("-", "−", 1) if cell[:1] == "-" else shown
        cells.append(f"<td{css_class}>{f'<b>{shown}</b>' if is_best else shown}</td>")
    kind = ' class="minor"' if minor else ""
    return f'<tr{kind}><th scope="row">{html.escape(row[0])}</th>{"".join(cells)}</tr>'
