"""The tables of a study, once, for the terminal, for Markdown and for a page."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from posenc.study.columns import aligned
from posenc.study.statistics import (
    Difference,
    Interval,
    Records,
    by_seed,
    judged,
    lengths,
    paired_differences,
    series,
)

Study = Mapping[str, Any]

PROTOCOLS = {
    "loss": "Non-overlapping windows: the same bytes, cut anew for each length",
    "loss_same_targets": "Same targets: the same last bytes of each window, after a longer context",
}
GROWTH = {"better": "falls", "worse": "rises"}
_COST = (
    "Over the runs that ended well, as timed on this machine; seconds are medians. Other work on "
    "it slows runs down, and not all alike."
)


@dataclass(frozen=True)
class Table:
    """Text in cells. ``minor`` rows belong to the row above them."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    minor: frozenset[int] = frozenset()

    def text(self, width: int | None = None) -> str:
        """Aligned columns under the caption, in lines of at most ``width`` where that can be."""
        return f"{_filled(self.caption, width)}\n\n{aligned([self.columns, *self.rows], width)}"

    def markdown(self) -> str:
        """A pipe table under the caption."""
        rule = [":--", *["--:"] * (len(self.columns) - 1)]
        lines = [map(_piped, self.columns), rule, *(map(_piped, row) for row in self.rows)]
        return "\n".join(
            [f"{_piped(self.caption)}", "", *(f"| {' | '.join(ln)} |" for ln in lines)]
        )

    def html(self) -> str:
        """A ``<table>``, everything in it escaped."""
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        body = "".join(_html_row(row, index in self.minor) for index, row in enumerate(self.rows))
        return (
            f'<div class="scroll"><table><caption>{html.escape(self.caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )


def table_text(study: Study, records: Records, width: int | None = None) -> str:
    """The losses of both protocols for a terminal, what the study set, then what failed."""
    tables = [table.text(width) for table in loss_tables(study, records)]
    said = [*settings(study, records), *failures(records)]
    parts = [_filled(caption(records), width), *tables, *(_filled(line, width) for line in said)]
    return "\n\n".join(parts)


def table_markdown(study: Study, records: Records) -> str:
    """What ``table_text`` says, in Markdown."""
    tables = [table.markdown() for table in loss_tables(study, records)]
    said = [*settings(study, records), *failures(records)]
    return "\n\n".join([caption(records), *tables, *map(_piped, said)])


def settings(study: Study, records: Records) -> list[str]:
    """What the study set that is not a scheme's own default: options, and a learning rate."""
    config = study["config"]
    fitted = [
        f"{name} is built with {options}" for name, options in study.get("fitted", {}).items()
    ]
    lines = (
        [f"Set by the study to suit the training length: {'; '.join(fitted)}."] if fitted else []
    )
    learned = [
        name for name, run in _first_runs(study, records).items() if run["params"]["position"]
    ]
    if learned and "position_lr_scale" in config:
        rate = config["position_lr_scale"]
        scale = "the learning rate" if rate == 1 else f"{rate:g} times the learning rate"
        lines.append(
            f"Learned position params ({', '.join(learned)}) have {scale} of the other weights."
        )
    return lines


def built(study: Study, records: Records) -> dict[str, str]:
    """Each scheme as it was built, layer by layer where layers differ; ``@512`` is a window."""
    shown = {}
    for name, run in _first_runs(study, records).items():
        schemes = run.get("schemes") or ()
        windows = run.get("windows") or (None,) * len(schemes)
        layers = [
            f"{scheme}@{window}" if window else scheme
            for scheme, window in zip(schemes, windows, strict=True)
        ]
        kinds = list(dict.fromkeys(layers))
        shown[name] = ", ".join(kinds if len(kinds) < 2 else layers)
    return {name: text for name, text in shown.items() if text}


def _first_runs(study: Study, records: Records) -> dict[str, Mapping[str, Any]]:
    """A run that ended well of each scheme, in the order of the study."""
    order = dict.fromkeys([*study["config"]["schemes"], *(r["scheme"] for r in records)])
    found = {r["scheme"]: r for r in reversed(records) if r["status"] == "ok"}
    return {name: found[name] for name in order if name in found}


def caption(records: Records) -> str:
    """What a cell of the loss tables is."""
    seeds = len({record["seed"] for record in records})
    what = (
        f"mean ± half the 95 % interval over {seeds} seeds"
        if seeds > 1
        else "one seed, no interval"
    )
    note = " [2 of 3]: of 3 runs, 2 have a finite loss." if any_lost(records) else ""
    return f"Bits per byte, lower is better; {what}.{note}"


def any_lost(records: Records) -> bool:
    """Whether a run failed, or has a loss that is not finite."""
    return any(
        point.lost
        for protocol in PROTOCOLS
        for line in series(records, protocol)
        for point in line.points.values()
    ) or bool(failures(records))


def failures(records: Records) -> list[str]:
    """A line for each run that did not end well."""
    return [
        f"failed: {record['scheme']}, seed {record['seed']}: {record.get('error') or 'no message'}"
        for record in records
        if record["status"] != "ok"
    ]


def loss_tables(study: Study, records: Records) -> list[Table]:
    """A table for each protocol that was scored."""
    tables = [_loss_table(study, records, protocol) for protocol in PROTOCOLS]
    return [table for table in tables if table is not None]


def _loss_table(study: Study, records: Records, protocol: str) -> Table | None:
    at = lengths(records, protocol)
    if not at and protocol != "loss":
        return None
    rows: list[Sequence[str]] = []
    minor: set[int] = set()
    for line in series(records, protocol, study["config"]["schemes"]):
        runs = [record for record in records if record["scheme"] == line.scheme]
        cells = [_cell(line.points.get(length), runs, records) for length in at]
        if line.windowed:
            minor.add(len(rows))
        rows.append((line.label, *cells))
    heads = [times(length, study["config"]["train_len"]) for length in at]
    return Table(PROTOCOLS[protocol], ["scheme", *heads], rows, frozenset(minor))


def difference_tables(study: Study, records: Records) -> list[Table]:
    """Each scheme against the reference at the training length and at the longest."""
    tables = []
    for protocol, title in PROTOCOLS.items():
        ends = end_lengths(study, records, protocol)
        found = [differences(study, records, protocol, length) for length in ends]
        columns = ["scheme"]
        for length in ends:
            columns += [f"at {times(length, study['config']['train_len'])}", "p", "verdict"]
        rows = [
            (name, *(cell for one in found for cell in _judged_cells(one.get(name))))
            for name in dict.fromkeys(name for one in reversed(found) for name in one)
        ]
        if rows:
            tables.append(Table(title, columns, rows))
    return tables


def differences(
    study: Study, records: Records, protocol: str, length: int
) -> dict[str, Difference]:
    """Verdicts against the reference; beyond the training length windowed rows take part."""
    losses = by_seed(records, protocol, length)
    windowed = by_seed(records, "loss_windowed", length)
    table = {}
    for line in series(records, protocol, study["config"]["schemes"]):
        beyond = length > study["config"]["train_len"]
        own = (windowed if line.windowed else losses).get(line.scheme)
        if own and (beyond or not line.windowed):
            table[line.label] = own
    name = reference(study)
    return paired_differences(table, name) if name in table else {}


def growth(study: Study, records: Records, protocol: str) -> dict[str, Difference]:
    """Each scheme's loss at the longest length minus its own at the training length."""
    ends = end_lengths(study, records, protocol)
    if len(ends) < 2:
        return {}
    short, long = (by_seed(records, protocol, length) for length in ends)
    pairs = {}
    for name in dict.fromkeys([*study["config"]["schemes"], *long]):
        start, end = short.get(name), long.get(name)
        if start and end:
            seeds = sorted(start.keys() | end.keys())
            pairs[name] = [end.get(s, math.nan) - start.get(s, math.nan) for s in seeds]
    return judged(pairs)


def growth_table(study: Study, records: Records, protocol: str) -> Table | None:
    """``growth`` as a table: rises, falls, or a tie of the two lengths."""
    ends = end_lengths(study, records, protocol)
    rows = []
    for name, found in growth(study, records, protocol).items():
        change, p, verdict = _judged_cells(found)
        rows.append((name, change, p, GROWTH.get(verdict, verdict)))
    title = f"Each scheme against itself, from {' to '.join(map(str, ends))} bytes of context"
    return Table(title, ["scheme", "change", "p", "verdict"], rows) if rows else None


def cost_table(study: Study, records: Records) -> Table:
    """Parameters, speed and time of each scheme over its seeds."""
    rows = []
    for name, first in _first_runs(study, records).items():
        runs = [r for r in records if r["scheme"] == name and r["status"] == "ok"]
        params = first["params"]
        share = f"{params['position']:,}"
        if params["position"]:
            share += f" ({params['position'] / params['total']:.1%})"
        speeds = [_over_runs(runs, "tokens_per_second", of, ",.0f") for of in (min, median)]
        seconds = [_over_runs(runs, f"{of}_seconds", median, ".1f") for of in ("train", "eval")]
        rows.append((name, f"{params['total']:,}", share, *speeds, *seconds))
    columns = ["scheme", "parameters", "of the scheme", "tokens/s, min", "tokens/s, median"]
    return Table(_COST, [*columns, "training, s", "evaluation, s"], rows)


def reference(study: Study) -> str:
    """The scheme that others are compared with."""
    return str(study["config"].get("reference") or study["config"]["schemes"][0])


def main_protocol(study: Study, records: Records) -> str:
    """The same targets where they were scored: the protocol that growing context answers to."""
    scored = end_lengths(study, records, "loss_same_targets")
    return "loss_same_targets" if scored else "loss"


def end_lengths(study: Study, records: Records, protocol: str) -> list[int]:
    """The training length, or the shortest there is, and the longest."""
    at = lengths(records, protocol)
    trained = study["config"]["train_len"]
    return sorted({trained if trained in at else at[0], at[-1]}) if at else []


def times(length: int, train_len: int) -> str:
    """``1024 (16x)``."""
    return f"{length} ({length / train_len:g}x)"


def _cell(interval: Interval | None, runs: Records, records: Records) -> str:
    if interval is None:
        return "–" if any(run["status"] == "ok" for run in runs) else "failed" if runs else "no run"
    if len({record["seed"] for record in records}) == 1 and interval.n:
        return f"{interval.mean:.3f}"  # the caption says that there is one seed
    return interval.text()


def _judged_cells(found: Difference | None) -> tuple[str, str, str]:
    if found is None or not found.interval.n:
        return "–", "–", found.verdict if found else "–"
    p = "–" if found.p != found.p else "<.001" if found.p < 0.001 else f"{found.p:.3f}".lstrip("0")
    return found.interval.text("+"), p, found.verdict


def _over_runs(runs: Records, key: str, of: Callable[[list[float]], float], form: str) -> str:
    values = [run[key] for run in runs if run.get(key) is not None]
    return f"{of(values):{form}}" if values else "–"


def _filled(text: str, width: int | None) -> str:
    """The text in lines of ``width``; words that are longer, such as paths, stay whole."""
    if width is None:
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _piped(cell: str) -> str:
    """A cell that neither ends its column nor becomes HTML."""
    return html.escape(cell, quote=False).replace("|", r"\|").replace("\n", " ")


def _html_row(row: Sequence[str], minor: bool) -> str:
    cells = []
    for cell in row[1:]:
        shown = html.escape(cell)
        marked = f' class="{shown}"' if cell in {"better", "worse", "tie", "rises", "falls"} else ""
        cells.append(f"<td{marked}>{shown.replace('-', '−', 1) if cell[:1] == '-' else shown}</td>")
    kind = ' class="minor"' if minor else ""
    return f'<tr{kind}><th scope="row">{html.escape(row[0])}</th>{"".join(cells)}</tr>'
