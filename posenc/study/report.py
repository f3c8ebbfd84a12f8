"""The report of a study: one self-contained HTML file, for screens, phones, print and dark mode."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from posenc.study.captions import caption, failures, has_lost_runs, schemes_as_built, settings
from posenc.study.differences import (
    baseline,
    difference_tables,
    differences,
    end_lengths,
    growth,
    growth_table,
    main_protocol,
)
from posenc.study.outcomes import has_text, of_task, outcomes, tasks, texts
from posenc.study.page import definitions, page
from posenc.study.plots import curve_svg, finetuning_svg, loss_svgs, note, position_svg
from posenc.study.results import UNIT, worded
from posenc.study.statistics import (
    Difference,
    Records,
    Summary,
    row_order,
    seeds_needed,
    series,
)
from posenc.study.sweep_plots import tuning_svgs
from posenc.study.sweep_tables import tuning_sentences, tuning_table
from posenc.study.table import Table, escape_markdown, wrap
from posenc.study.tables import (
    cost_table,
    holds_table,
    loss_tables,
    several_lengths,
    stability_table,
    table_markdown,
    table_text,
)
from posenc.study.task_plots import group_svg, task_svg
from posenc.study.task_tables import notes, sentences, task_tables

_VERDICTS = (
    "Verdicts come from two-sided t tests, paired by seed, with Holm's correction within each "
    "column. A tie means that these seeds show no significant difference (p ≥ .05), not that the "
    "two are equal. The intervals are 95 % each, not corrected. differences.csv has every length."
)
_TASK_NOTE = (
    "Thin lines are single seeds, thick lines their medians; small dots are single seeds too. "
    "Seeds that solved a task in training and seeds that did not are never averaged: where some "
    "did, the others are left out of scores. All schemes of a seed have the same first weights, "
    "examples and order. tasks.csv has every seed, test and length."
)
_TUNING_NOTE = (
    "A curve is the lowest loss at each value of the option, with any values of the other tuned "
    "options. A ring marks the choice, a cross a value whose training diverged or failed. "
    "tuning.csv has every run."
)
_EACH_LENGTH = (
    "Rows of one training length score the same bytes. Rows of different training lengths do so "
    "where --eval-lens names the lengths of evaluation."
)
_MOST_NAMES = 6  # in a sentence
_FEW_SEEDS = 5  # fewer find only differences far larger than their spread
_CAVEATS = (
    "The results hold for one configuration: this model, text, number of steps and seeds. "
    "Published comparisons with other models contradict one another, and may contradict this one.",
    "Intervals are over seeds (initial weights, order of the text). All runs score the same "
    "held-out bytes, so the intervals say nothing about other text.",
    "Non-overlapping windows favour longer windows: fewer of their targets have little context to "
    "their left (the early-token curse). A loss that falls with length there does not show that "
    "the model uses more context; the same-targets protocol tests that.",
    "Learned position params have their own learning rate here: position_lr_scale times that of "
    "the other weights. In a short run a bias that starts near zero barely moves without it, and "
    "extrapolation depends on how far it moves. Train with the same setting to see the same "
    "result: posenc_torch.param_groups makes such groups for an optimizer in PyTorch, "
    "posenc_jax.param_labels makes the labels for optax.multi_transform.",
    "Rows of a learned table beyond the training length are untrained. There the loss depends on "
    "the initial values of those rows, not on the idea of the scheme.",
    "A window row is the same trained model with a window of the training length at test time. A "
    "scheme that extrapolates must beat it.",
)
_CONDITION = {
    "loss": "In non-overlapping windows",
    "loss_same_targets": "On the same targets after a longer context",
}


def study_text(summary: Summary, records: Records, width: int | None = None) -> str:
    """For a terminal: all tables of the study."""
    parts = [table_text(summary, records, width)] if has_text(summary) else []
    parts += [table.text(width) for table in _other_tables(summary, records)]
    lines = [*_lines(summary, records), *_task_failures(summary, records)]
    return "\n\n".join([*parts, *(wrap(line, width) for line in lines)])


def study_markdown(summary: Summary, records: Records) -> str:
    """The content of ``study_text`` in Markdown."""
    parts = [table_markdown(summary, records)] if has_text(summary) else []
    parts += [table.markdown() for table in _other_tables(summary, records)]
    lines = [*_lines(summary, records), *_task_failures(summary, records)]
    return "\n\n".join([*parts, *map(escape_markdown, lines)])


def _other_tables(summary: Summary, records: Records) -> list[Table]:
    tuned = tuning_table(summary)
    return [*task_tables(summary, records), *([tuned] if tuned else ())]


def _lines(summary: Summary, records: Records) -> list[str]:
    return [*_task_lines(summary, records), *tuning_sentences(summary)]


def _task_lines(summary: Summary, records: Records) -> list[str]:
    return [*sentences(summary, records), *notes(summary, records)]


def _task_failures(summary: Summary, records: Records) -> list[str]:
    return [
        f"{label}: {line}"
        for label, one in tasks(summary).items()
        for line in failures(of_task(records, one))
    ]


def write_report(summary: Summary, records: Records, path: str | os.PathLike[str]) -> None:
    """Write the report: no scripts, nothing from the network, all text of the study escaped."""
    every = records
    about = ", ".join(tasks(summary)) or str(summary["corpus"]["name"])
    text = _text(texts(summary, records))
    body = (
        f"<h1>Positional encodings compared</h1>{_overview(summary, records)}"
        f"{_tasks(summary, every)}{text}{_tuning(summary)}{_conditions(summary, every)}"
    )
    title = f"Positional encodings on {about}"
    Path(path).write_text(page(title, body), encoding="utf-8")


def headline(summary: Summary, records: Records) -> str:
    """The verdicts at the longest length in words, preferably those on the same targets."""
    if not any(record["status"] == "ok" for record in records):
        return "No run succeeded, so there is nothing to compare."
    if len({record["seed"] for record in records}) == 1:
        return (
            "One seed: the numbers below have no intervals, so the report calls no scheme better."
        )
    protocol = main_protocol(summary, records)
    longest = end_lengths(summary, records, protocol)[-1]
    against, change = (
        differences(summary, records, protocol, longest),
        growth(summary, records, protocol),
    )
    name = baseline(summary)
    compared = [
        _list_names(against, "better", "lower for {}"),
        _list_names(against, "worse", "higher for {}"),
        _list_names(against, "tie", "no significant difference for {}"),
    ]
    grown = [
        _list_names(change, "worse", "it rose for {}"),
        _list_names(change, "better", "it fell for {}"),
        _list_names(change, "tie", "no significant change for {}"),
    ]
    factor = longest / summary["config"]["train_len"]
    where = "the training length" if factor == 1 else f"{factor:g} times the training length"
    tuned = ", after fine-tuning" if any(record.get("finetune") for record in records) else ""
    first = (
        f"{_CONDITION[protocol]}, {worded(UNIT, records)} at {where}{tuned}, in this "
        f"configuration, compared with {name}: "
    )
    second = "From the training length to there "
    parts = [(first, compared), (second, grown)]
    sentences = [f"{start}{'; '.join(filter(None, some))}." for start, some in parts if any(some)]
    if not sentences:
        return "No scheme has enough runs to be compared."
    sentences = [*_lowest(summary, records, protocol, longest, where), *sentences]
    sentences += _more_seeds(against, len({record["seed"] for record in records}))
    lost = (
        ["Runs that failed or diverged are not in these means."] if has_lost_runs(records) else []
    )
    return " ".join(sentences + lost)


def _lowest(
    summary: Summary, records: Records, protocol: str, length: int, where: str
) -> list[str]:
    """The scheme with the lowest loss, if its interval is apart from all others."""
    lines = series(records, protocol, row_order(records, summary))
    points = {line.label: line.points[length] for line in lines if length in line.points}
    points = {label: point for label, point in points.items() if point.n > 1}
    if len(points) < 2:
        return []
    first, *others = sorted(points, key=lambda label: points[label].mean)
    end = points[first].mean + points[first].half_width
    near = [label for label in others if points[label].mean - points[label].half_width <= end]
    if not near:
        return [f"{first} has the lowest loss at {where}, {points[first].text()}."]
    more = f" and {len(near) - 3} others" if len(near) > 3 else ""
    return [
        f"{first} has the lowest mean loss at {where}, {points[first].text()}; the intervals of "
        f"{', '.join(near[:3])}{more} overlap with its own."
    ]


def _more_seeds(against: Mapping[str, Difference], seeds: int) -> list[str]:
    """How many seeds would tell the schemes apart that a few seeds do not."""
    ties = {name: one for name, one in against.items() if one.verdict == "tie"}
    if not ties or seeds >= _FEW_SEEDS:
        return []
    tests = sum(one.p == one.p for one in against.values())
    needed = {name: seeds_needed(one, tests) for name, one in ties.items()}
    shown = [f"{name} {f'about {n}' if n else 'more than 99'}" for name, n in needed.items()]
    more = ", and others" * (len(shown) > _MOST_NAMES)
    return [
        f"{seeds} seeds decide little. If more differ as these do, a verdict needs so many: "
        f"{', '.join(shown[:_MOST_NAMES])}{more}; set by --seeds."
    ]


def _list_names(differences: Mapping[str, Difference], verdict: str, form: str) -> str:
    """``form`` with ``t5 (-0.134) and rope (+3.079)``; empty if no scheme has this verdict.

    Of more than ``_MOST_NAMES``, those with the largest differences are named.
    """
    found = {name: one.interval.mean for name, one in differences.items() if one.verdict == verdict}
    names = [f"{name} ({mean:+.3f})" for name, mean in found.items()]
    if len(found) > _MOST_NAMES:
        largest = sorted(found, key=lambda name: -abs(found[name]))[: _MOST_NAMES - 1]
        names = [f"{name} ({found[name]:+.3f})" for name in found if name in largest]
        names.append(f"{len(found) - len(largest)} others")
    joined = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return form.format(joined) if names else ""


def _overview(summary: Summary, records: Records) -> str:
    config, of = summary["config"], list(tasks(summary))
    seeds = len({record["seed"] for record in records})
    where, lines, lost = [], [], []
    if of_text := texts(summary, records):
        lengths = [own["config"]["train_len"] for own, _ in of_text]
        shown = " and ".join(map(str, lengths))
        plural = "s" * (len(lengths) > 1)
        where.append(f"at length{plural} {shown} on {summary['corpus']['name']}")
        for length, one in zip(lengths, of_text, strict=True):
            lines.append(f"Trained at {length}: " * (len(lengths) > 1) + headline(*one))
            lost += failures(one[1])
    if of:
        where.append(f"on {len(of)} task{'s' * (len(of) > 1)}")
        lines += _task_lines(summary, records)
        lost += _task_failures(summary, records)
    lines += tuning_sentences(summary)
    line = (
        f"{len(config['schemes'])} schemes, {seeds} seed{'s' * (seeds != 1)}, trained "
        f"{' and '.join(where)}; took {summary['wall_seconds']:.0f} s"
    )
    failed = "".join(f"<li>{html.escape(text)}</li>" for text in lost)
    said = "".join(f'<p class="headline">{_prose(text)}</p>' for text in lines)
    return (
        said
        + f'<p class="note">{html.escape(line)}</p>{_command(summary)}'
        + (
            f'<section class="failed"><h2>Failures</h2><ul>{failed}</ul></section>'
            if failed
            else ""
        )
    )


def _command(summary: Summary) -> str:
    line = summary.get("command")
    return f"<pre>{html.escape(line)}</pre>" if line else ""


def _tasks(summary: Summary, records: Records) -> str:
    """The tables of all tasks, and the panel of each with its table."""
    every, order = tasks(summary), list(summary["config"]["schemes"])
    if not every:
        return ""
    tables = task_tables(summary, records)
    first, each = tables[: -len(every)], tables[-len(every) :]
    parts = ["<h2>Tasks</h2>", *(table.html() for table in first)]
    for (label, about), table in zip(every.items(), each, strict=True):
        smooth = stability_table(summary, of_task(records, about))
        found = outcomes(about, records)
        svgs = task_svg(label, about, found, order), group_svg(label, about, found)
        figures = "".join(f"<figure>{svg}</figure>" for svg in svgs if svg)
        source = f" {about['paper']}." if about["paper"] else ""
        parts.append(
            f"<h2>{html.escape(label)}</h2><p>{html.escape(about['title'].replace('`', ''))}"
            f'{html.escape(source)}</p><div class="pair">{figures}</div>{table.html()}'
            f"{smooth.html() if smooth else ''}"
        )
    parts.append(f'<p class="note">{_TASK_NOTE}</p>')
    return "".join(parts)


def _text(studies: Sequence[tuple[Summary, Records]]) -> str:
    """The sections of text; of several training lengths their common tables, then each alone."""
    if not studies:
        return ""
    parts = []
    if len(studies) > 1:
        tables = loss_tables(*several_lengths(studies))
        shown = "".join(table.html() for table in tables)
        parts.append(f"<h2>All training lengths</h2><p>{_EACH_LENGTH}</p>{shown}")
    for own, records in studies:
        of = f"Trained at {own['config']['train_len']} bytes"
        if len(studies) > 1:
            parts.append(f'<h2 class="part">{worded(of, records)}</h2>')
        parts += [part(own, records) for part in (_losses, _comparisons, _positions, _training)]
    return "".join([*parts, _caveats()])


def _losses(summary: Summary, records: Records) -> str:
    figures = "".join(f"<figure>{svg}</figure>" for svg in loss_svgs(summary, records))
    every = [*loss_tables(summary, records), holds_table(summary, records)]
    tables = "".join(table.html() for table in every if table)
    return (
        f'<h2>Loss against length</h2><div class="pair">{figures}</div>'
        f'<p class="note">{html.escape(note(records))}</p>'
        f"<p>{html.escape(caption(records, summary))}</p>{tables}{_built(summary, records)}"
    )


def _built(summary: Summary, records: Records) -> str:
    """The settings of each row: options, and the learning rate of learned params."""
    notes = " ".join(settings(summary, records))
    entries = definitions(schemes_as_built(summary, records))
    return (f"<h2>Schemes as built</h2><dl>{entries}</dl>" if entries else "") + (
        f"<p>{html.escape(notes)}</p>" if notes else ""
    )


def _comparisons(summary: Summary, records: Records) -> str:
    tables = [table.html() for table in difference_tables(summary, records)]
    grown = growth_table(summary, records, main_protocol(summary, records))
    if grown:
        tables.append(grown.html())
    if not tables:
        return ""
    name = html.escape(baseline(summary))
    return f"<h2>Differences from {name}</h2><p>{_VERDICTS}</p>{''.join(tables)}"


def _positions(summary: Summary, records: Records) -> str:
    name = baseline(summary)
    svg = position_svg(summary, records, name)
    if not svg:
        return ""
    about = (
        f"The loss at each position of the longest windows minus that of {name}, paired by seed. "
        "Both read the same text, so easy and hard stretches of it cancel."
    )
    return f"<h2>Loss by position</h2><p>{html.escape(about)}</p><figure>{svg}</figure>"


def _training(summary: Summary, records: Records) -> str:
    svg = curve_svg(summary, records)
    figure = f"<h2>Training</h2><figure>{svg}</figure>" if svg else ""
    table = stability_table(summary, records)
    if table:
        figure = f"{figure or '<h2>Training</h2>'}{table.html()}"
    svg = finetuning_svg(summary, records)
    figure += f"<h2>Fine-tuning</h2><figure>{svg}</figure>" if svg else ""
    return f"{figure}<h2>Cost</h2>{cost_table(summary, records).html()}"


def _tuning(summary: Summary) -> str:
    table = tuning_table(summary)
    if table is None:
        return ""
    figures = "".join(f"<figure>{svg}</figure>" for svg in tuning_svgs(summary))
    said = "".join(f"<p>{html.escape(line)}</p>" for line in tuning_sentences(summary))
    note = f'<p class="note">{html.escape(_TUNING_NOTE)}</p>'
    return f'<h2>Tuning</h2><div class="pair">{figures}</div>{note}{table.html()}{said}'


def _caveats() -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in _CAVEATS)
    return f"<h2>Read with care</h2><ul>{items}</ul>"


def _conditions(summary: Summary, records: Records) -> str:
    ran: Mapping[str, str] = next((r["versions"] for r in records if r.get("versions")), {})
    parts = {
        "Configuration": summary["config"],
        "Corpus": summary["corpus"],
        "Versions and machine": {**summary["versions"], **ran},
    }
    return "".join(
        f"<h2>{title}</h2><dl>{definitions(values)}</dl>"
        for title, values in parts.items()
        if values
    )


def _prose(text: str) -> str:
    return html.escape(text).replace("(-", "(−")
