"""Pictures of a study: loss against length, loss by position, training curves."""

from __future__ import annotations

import functools
import io
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posenc.study.panels import (
    FONT,
    GRID,
    INK,
    MUTED,
    PALETTE,
    Line,
    dots_height,
    draw,
    draw_dots,
    label_ends,
    label_height,
    label_room,
    limits_of,
    log_axis,
)
from posenc.study.picture import encode
from posenc.study.results import UNIT, worded
from posenc.study.statistics import (
    SORTED_FROM,
    Records,
    Summary,
    mean_interval,
    row_order,
    series,
)

_TITLES = {"loss": "Non-overlapping windows", "loss_same_targets": "Same targets, growing context"}


def loss_against_length(
    records: Records,
    path: str | os.PathLike[str],
    summary: Summary | None = None,
    form: str = "png",
) -> None:
    """Plot both protocols side by side, one line per scheme: a PNG of 1600 by 1000, an SVG or PDF.

    Bands are 95 % intervals over seeds. A dashed line is a scheme inside a window of the training
    length at test time. Many schemes are rows of dots instead, sorted by the loss at the longest
    length of non-overlapping windows, and the picture is as high as they need.
    ``summary`` gives the title and the order of schemes. ``form`` is ``"png"``, ``"svg"`` or
    ``"pdf"``; the path's suffix does not matter.
    """
    from matplotlib.figure import Figure

    studies = _by_training_length(records)
    panels = [[_loss_lines(own, key, summary) for key in _TITLES] for own in studies]
    if _are_many(panels[0][0]):
        Path(path).write_bytes(encode(_dots_figure(panels, records, summary), form))
        return
    together = [line for row in panels for lines in row for line in lines]
    each = max(6.25, label_height(max((s for row in panels for s in row), key=len)) / 0.72)
    figure = Figure(figsize=(10, each * len(panels)), dpi=160)
    limits, width = limits_of(together), 0.418 - label_room(together) / 10
    for row, own in enumerate(studies):
        for index, (title, lines) in enumerate(zip(_TITLES.values(), panels[row], strict=True)):
            up = (0.15 + len(panels) - 1 - row) / len(panels)
            axes = figure.add_axes((0.077 + 0.5 * index, up, width, 0.72 / len(panels)))
            _loss_panel(axes, lines, own, limits, title)
    up = 1 - 0.055 / len(panels)
    figure.text(0.015, up, _title(records, summary), fontsize=13, color=INK, parse_math=False)
    figure.text(0.015, 0.018 / len(panels), note(records), fontsize=8, color=MUTED)
    Path(path).write_bytes(encode(figure, form))


def _by_training_length(records: Records) -> list[Records]:
    """The records of each training length: a row of panels each."""
    lengths = _training_lengths(records)
    if len(lengths) < 2:
        return [records]
    return [[r for r in records if r.get("train_len") == length] for length in lengths]


def _are_many(lines: Sequence[Line]) -> bool:
    return len({line.colour for line in lines}) >= SORTED_FROM


def _dots_figure(
    panels: Sequence[Sequence[Sequence[Line]]], records: Records, summary: Summary | None
) -> Any:
    from matplotlib.figure import Figure

    together = [line for row in panels for lines in row for line in lines]
    rows = dots_height(max(len(lines) for row in panels for lines in row))
    each, left = rows + 1.7, label_room(together) / 10
    height = each * len(panels)
    figure = Figure(figsize=(10, height), dpi=160)
    width = 0.98 / 2 - left - 0.01
    lengths = _training_lengths(records)
    for row, both in enumerate(panels):
        of = f", trained at {lengths[row]}" if len(panels) > 1 else ""
        for index, (title, lines) in enumerate(zip(_TITLES.values(), both, strict=True)):
            up = (0.75 + each * (len(panels) - 1 - row)) / height
            axes = figure.add_axes((left + 0.49 * index, up, width, rows / height))
            _dots_panel(axes, lines, records, limits_of(together), f"{title}{of}")
    up = 1 - 0.3 / height
    figure.text(0.015, up, _title(records, summary), fontsize=13, color=INK, parse_math=False)
    figure.text(0.015, 0.12 / height, note(records), fontsize=8, color=MUTED)
    return figure


def _dots_panel(
    axes: Any, lines: Sequence[Line], records: Records, limits: tuple[float, float], title: str
) -> None:
    draw_dots(axes, lines, limits)
    axes.set_title(title, loc="left", fontsize=FONT, color=MUTED, pad=20)
    axes.set_xlabel(f"{worded(UNIT, records)} (lower is better)", color=MUTED)


def loss_svgs(summary: Summary, records: Records) -> list[str]:
    """The two panels of ``loss_against_length``, each as a separate ``<svg>``."""
    panels = {title: _loss_lines(records, key, summary) for key, title in _TITLES.items()}
    together = [line for lines in panels.values() for line in lines]
    figures = []
    for title, lines in panels.items():
        limits = limits_of(together)
        if _are_many(lines):
            panel = functools.partial(_dots_panel, records=records, limits=limits, title=title)
            figures.append(dots_svg(title, lines, panel))
            continue
        panel = functools.partial(_loss_panel, records=records, limits=limits, title=title)
        figures.append(line_svg(title, lines, panel, room=label_room(together)))
    return [figure for figure in figures if figure]


def position_svg(summary: Summary, records: Records, baseline: str) -> str:
    """Loss by position minus that of the baseline, as an ``<svg>``; empty if there is none."""
    lines = _position_lines(records, summary, baseline)
    title = "Loss by position, minus that of the baseline"
    return line_svg(title, lines, functools.partial(_position_panel, records=records))


def curve_svg(summary: Summary, records: Records) -> str:
    """Training curves as an ``<svg>``; empty if there are none."""
    return line_svg("Training loss", _curve_lines(records, summary), _curves(records))


def finetuning_svg(summary: Summary, records: Records) -> str:
    """Losses of fine-tuning as an ``<svg>``, a line for each label; empty if there are none."""
    lines = []
    for colour, scheme in enumerate(row_order(records, summary)):
        own = [r["finetune"]["curve"] for r in records if r["scheme"] == scheme and "finetune" in r]
        if own:
            at = [step for step, _ in own[0]]
            means = [mean_interval(loss for _, loss in row) for row in zip(*own, strict=True)]
            lines.append(Line(scheme, at, means, colour))
    return line_svg("Fine-tuning loss", lines, _curves(records))


def _curves(records: Records) -> functools.partial[None]:
    return functools.partial(_curve_panel, records=records)


def note(records: Records) -> str:
    """The meaning of bands, or their absence, and of dashes in a figure of losses."""
    seeds = len({record["seed"] for record in records})
    drawn = {record["scheme"] for record in records if record["status"] == "ok"}
    bands = "Bands: 95 % intervals over {} seeds."
    if len(drawn) >= SORTED_FROM:
        bands = "Means over {} seeds, by length; the tables have the intervals."
    bands = bands.format(seeds) if seeds > 1 else "One seed: no intervals."
    dashed = []
    if any(record.get("loss_windowed") for record in records):
        dashed.append("attention inside a window of the training length at test time")
    if any(record.get("before") for record in records):
        dashed.append("without the fine-tuning of the solid lines")
    return f"{bands} Dashed: {', or '.join(dashed)}." if dashed else bands


def _title(records: Records, summary: Summary | None) -> str:
    """The model's size and the text; position params are not counted, as they differ by scheme."""
    params = [r["params"] for r in records if r.get("params")]
    sizes = sorted({p["total"] - p["position"] for p in params})
    ends = dict.fromkeys(f"{size / 1000:,.0f} k" for size in sizes[:1] + sizes[-1:])
    model = f"Models of {'–'.join(ends)} parameters" if sizes else ""
    return ", ".join(filter(None, [model, str(summary["corpus"]["name"]) if summary else ""]))


def _training_lengths(records: Records) -> list[int]:
    return sorted({record["train_len"] for record in records if "train_len" in record})


def _loss_lines(records: Records, key: str, summary: Summary | None) -> list[Line]:
    order = row_order(records, summary)
    return [
        Line(s.label, list(s.points), list(s.points.values()), order.index(s.scheme), s.minor)
        for s in series(records, key, order)
        if s.points
    ]


def _position_lines(records: Records, summary: Summary, baseline: str) -> list[Line]:
    """Differences to the baseline, paired by seed: both read the same text in each bucket."""
    curves = {
        (r["scheme"], r["seed"]): r["loss_by_position"]
        for r in records
        if r.get("loss_by_position")
    }
    lines = []
    for colour, scheme in enumerate(row_order(records, summary)):
        pairs = [
            (curve, curves[baseline, seed])
            for (name, seed), curve in curves.items()
            if name == scheme != baseline and (baseline, seed) in curves
        ]
        if pairs:
            bucket = pairs[0][0]["bucket"]
            rows = zip(*([_minus(a, b) for a, b in pairs]), strict=True)
            intervals = [mean_interval(row) for row in rows]
            centres = [bucket * (i + 0.5) for i in range(len(intervals))]
            lines.append(Line(scheme, centres, intervals, colour))
    return lines


def _minus(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    pairs = zip(one["loss"], other["loss"], strict=True)
    return [math.nan if None in pair else pair[0] - pair[1] for pair in pairs]


def _curve_lines(records: Records, summary: Summary) -> list[Line]:
    """One line for all labels that share their trainings, named by what they are trained as."""
    lines, drawn = [], set()
    for colour, scheme in enumerate(row_order(records, summary)):
        steps: dict[float, list[float]] = {}
        name = scheme
        for record in records:
            training = record.get("training")
            if record["scheme"] == scheme and (training is None or training not in drawn):
                drawn.add(training)
                name = record.get("trained_as", scheme)
                for step, loss in record.get("curve") or ():
                    steps.setdefault(step, []).append(math.nan if loss is None else loss)
        if steps:
            at = sorted(steps)
            lines.append(Line(name, at, [mean_interval(steps[s]) for s in at], colour))
    return lines


def _loss_panel(
    axes: Any, lines: Sequence[Line], records: Records, limits: tuple[float, float], title: str
) -> None:
    draw(axes, lines, limits, marker=True)
    at = sorted({length for line in lines for length in line.x})
    trained = _training_lengths(records)
    log_axis(axes, at, trained)
    label_ends(axes, lines)
    axes.set_title(title, loc="left", fontsize=FONT, color=MUTED)
    axes.set_xlabel(worded("evaluation length (bytes)", records), color=MUTED)
    axes.set_ylabel(f"{worded(UNIT, records)} (lower is better)", color=MUTED)


def _position_panel(axes: Any, lines: Sequence[Line], records: Records) -> None:
    draw(axes, lines, limits_of(lines), marker=False)
    axes.axhline(0, color=INK, linewidth=1)
    longest = max(x for line in lines for x in line.x)
    start = lines[0].x[0] * 2
    ticks = [start * 2**i for i in range(1 + max(0, math.ceil(math.log2(longest / start))))]
    log_axis(axes, ticks, _training_lengths(records))
    axes.set_xlim(lines[0].x[0], ticks[-1])
    label_ends(axes, lines)
    axes.set_xlabel(worded("position in the window (bytes)", records), color=MUTED)
    axes.set_ylabel(f"difference in {worded(UNIT, records)}", color=MUTED)


def _curve_panel(axes: Any, lines: Sequence[Line], records: Records) -> None:
    last = max(line.x[-1] for line in lines)
    # The first steps start at 8 bits per byte and would compress the rest of the curve.
    late = [
        i for line in lines for x, i in zip(line.x, line.intervals, strict=True) if x >= last / 10
    ]
    draw(axes, lines, limits_of([Line("", [], late, 0)]), marker=False)
    label_ends(axes, lines)
    axes.set_xlabel("step", color=MUTED)
    axes.set_ylabel(f"training loss, {worded(UNIT, records)}", color=MUTED)


def line_svg(
    title: str,
    lines: Sequence[Line],
    panel: Callable[[Any, Sequence[Line]], None],
    room: float | None = None,
) -> str:
    """A panel of lines as an ``<svg>``; empty if there are none."""
    if not lines:
        return ""
    from matplotlib.figure import Figure

    width, height, left = 5.8, max(4.2, label_height(lines) / 0.77), 0.65
    figure = Figure(figsize=(width, height))
    room = label_room(lines) if room is None else room
    axes = figure.add_axes((left / width, 0.15, (width - left - room) / width, 0.77))
    panel(axes, lines)
    return figure_svg(title, figure)


def dots_svg(
    title: str, lines: Sequence[Line], panel: Callable[[Any, Sequence[Line]], None]
) -> str:
    """A panel of dots as an ``<svg>``: as high as its rows need."""
    from matplotlib.figure import Figure

    width, left, rows = 5.8, label_room(lines), dots_height(len(lines))
    height = rows + 1.2
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((left / width, 0.6 / height, 0.97 - left / width, rows / height))
    panel(axes, lines)
    return figure_svg(title, figure)


def figure_svg(title: str, figure: Any) -> str:
    """A figure as an ``<svg>`` of a page, in its colours."""
    import matplotlib as mpl

    buffer = io.StringIO()
    # The salt makes ids differ between the figures of a page, and equal in every run.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    return _apply_theme(buffer.getvalue(), title)


def _apply_theme(svg: str, title: str) -> str:
    """The ``<svg>`` without namespaces, sizes and fonts, and with CSS variables as colours."""
    svg = svg[svg.index("<svg") :]
    opening = rf'<svg role="img" aria-label="{title}" \1>'
    svg = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", opening, svg, count=1)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    svg = re.sub(r" ?font-family: [^;\"]*;", "", svg)
    names = {INK: "--ink", MUTED: "--muted", GRID: "--grid"}
    names |= {colour: f"--line-{index}" for index, colour in enumerate(PALETTE)}
    return re.sub("|".join(names), lambda match: f"var({names[match[0]]})", svg)
