"""Pictures of a sweep: the validation loss against each option, one curve per scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from posenc.study.captions import tuned
from posenc.study.panels import (
    FONT,
    INK,
    MUTED,
    PALETTE,
    Line,
    draw,
    label_ends,
    label_height,
    label_room,
    limits_of,
)
from posenc.study.picture import encode
from posenc.study.plots import figure_svg
from posenc.study.statistics import Interval, Summary
from posenc.study.sweep_tables import along, every

_MOST_TICKS = 8
_TITLE = "Validation loss of each tried value"


def tuning_picture(summary: Summary, form: str) -> bytes:
    """All panels, one row per task and one column per option, in one of ``picture.FORMATS``."""
    from matplotlib.figure import Figure

    rows = [[p for p in _panels(summary) if p[0] == key] for key in _keys(summary)]
    lines = [line for row in rows for _, _, found in row for line in found]
    room, across = label_room(lines), max(map(len, rows))
    width, height = 3.4 + 0.75 + room, _height(rows)
    figure = Figure(figsize=(across * width, len(rows) * height), dpi=160)
    for down, row in enumerate(rows):
        for column, (key, option, found) in enumerate(row):
            left = (0.75 + column * width) / (across * width)
            up = (len(rows) - 1 - down + 0.16) / len(rows)
            place = left, up, 3.4 / (across * width), 0.72 / len(rows)
            axes = figure.add_axes(place)
            _panel(axes, found, summary, key, option)
            axes.set_title(key if len(rows) > 1 else _TITLE, loc="left", fontsize=FONT, color=MUTED)
    return encode(figure, form)


def tuning_svgs(summary: Summary) -> list[str]:
    """Each panel as an ``<svg>``."""
    from matplotlib.figure import Figure

    found = []
    for key, option, lines in _panels(summary):
        width, height, left = 5.8, _height([[(key, option, lines)]]), 0.75
        figure = Figure(figsize=(width, height))
        across = (width - left - label_room(lines)) / width
        axes = figure.add_axes((left / width, 0.15, across, 0.75))
        _panel(axes, lines, summary, key, option)
        name = f"{_TITLE}, {key}" if len(_keys(summary)) > 1 else _TITLE
        axes.set_title(name, loc="left", fontsize=FONT, color=MUTED)
        found.append(figure_svg(f"{name}: {option}", figure))
    return found


def _keys(summary: Summary) -> list[str]:
    return list(dict.fromkeys(one["task"] for one in every(summary)))


def _panels(summary: Summary) -> list[tuple[str, str, list[Line]]]:
    """The task, the option and the lines of each panel."""
    order = list(summary["config"]["schemes"])
    found = []
    for key in _keys(summary):
        for option in tuned(summary):
            lines = []
            for one in every(summary):
                if one["task"] == key and option in one["grid"]:
                    losses = along(one, option)
                    points = [math.nan if x is None else x for x in losses.values()]
                    means = [Interval(x, math.nan, int(x == x)) for x in points]
                    colour = order.index(one["labels"][0])
                    lines.append(Line(one["scheme"], list(losses), means, colour))
            if lines:
                found.append((key, option, lines))
    return found


def _height(rows: Sequence[Sequence[tuple[str, str, list[Line]]]]) -> float:
    return max(3.6, *(label_height(lines) / 0.72 for row in rows for _, _, lines in row))


def _panel(axes: Any, lines: Sequence[Line], summary: Summary, key: str, option: str) -> None:
    """Curves; a ring is the choice, a cross at the top a value without a loss."""
    draw(axes, lines, limits_of(lines), marker=True)
    values = sorted({x for line in lines for x in line.x})
    if values[0] > 0:
        axes.set_xscale("log", base=2)
    if len(values) <= _MOST_TICKS:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    for n, line in enumerate(lines):  # crosses below one another
        colour = PALETTE[line.colour % len(PALETTE)]
        lost = [x for x, i in zip(line.x, line.intervals, strict=True) if not i.n]
        at = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(lost, [1 - 0.05 * n] * len(lost), "x", color=colour, markersize=7, **at)
    for one in every(summary):
        if one["task"] == key and option in one["chosen"]:
            value = one["chosen"][option]
            ring = {"markersize": 11, "fillstyle": "none", "color": INK, "linestyle": "none"}
            axes.plot([value], [along(one, option)[value]], marker="o", **ring)
    label_ends(axes, lines)
    axes.set_xlabel(f"{option}; ring: chosen", color=MUTED)
    unit = next(one["unit"] for one in every(summary) if one["task"] == key)
    axes.set_ylabel(f"validation loss, {unit}", color=MUTED)
