"""Pictures of a task: its score against length, and by depth and length."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from posenc.study.outcomes import Outcome, score_name
from posenc.study.panels import (
    FONT,
    INK,
    MUTED,
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
from posenc.study.plots import dots_svg, figure_svg, line_svg
from posenc.study.statistics import SORTED_FROM, Interval

_SHARES = (-0.03, 1.1)  # room for the mark of the training length
_ACROSS = 3  # heat maps in a row


def task_svg(
    label: str, about: Mapping[str, Any], found: Sequence[Outcome], order: Sequence[str]
) -> str:
    """The panel of a task as an ``<svg>``; empty without scores. ``order`` gives colours."""
    lines = _lines(about, found, order)
    if len(lines) >= SORTED_FROM:
        return dots_svg(label, lines, functools.partial(_dots, about=about, title=label))
    return line_svg(label, lines, functools.partial(_panel, about=about, title=label))


def task_picture(
    label: str, about: Mapping[str, Any], found: Sequence[Outcome], order: Sequence[str], form: str
) -> bytes:
    """The panel of a task for a paper, in one of ``picture.FORMATS``."""
    from matplotlib.figure import Figure

    lines = _lines(about, found, order)
    if len(lines) >= SORTED_FROM:
        width, left, rows = 5.5, label_room(lines), dots_height(len(lines))
        height = rows + 1.2
        figure = Figure(figsize=(width, height), dpi=160)
        axes = figure.add_axes((left / width, 0.6 / height, 0.97 - left / width, rows / height))
        _dots(axes, lines, about, label)
        return encode(figure, form)
    width, height = 4.5, max(3.2, label_height(lines) / 0.7)
    figure = Figure(figsize=(width, height), dpi=160)
    room = label_room(lines)
    axes = figure.add_axes((0.62 / width, 0.2, (width - 0.62 - room) / width, 0.68))
    _panel(axes, lines, about, label)
    return encode(figure, form)


def group_svg(label: str, about: Mapping[str, Any], found: Sequence[Outcome]) -> str:
    """A heat map of each scheme: token accuracy by group and length; empty if there are none."""
    lengths, names = about["eval_lens"], about["group_names"]
    maps = {one.label: [one.groups(n) for n in lengths] for one in found}
    maps = {scheme: rows for scheme, rows in maps.items() if all(rows)}
    if not maps:
        return ""
    from matplotlib.figure import Figure

    across = min(_ACROSS, len(maps))
    down = -(-len(maps) // across)
    each = 0.2 * len(names) + 0.6
    figure = Figure(figsize=(5.8, down * each + 0.3), layout="constrained")
    grid: Any = figure.subplots(down, across, squeeze=False)
    for n, (scheme, rows) in enumerate(maps.items()):
        axes = grid[n // across][n % across]
        columns = list(zip(*rows, strict=True))
        axes.imshow(columns, cmap="Greys", vmin=0, vmax=1.25, aspect="auto", origin="lower")
        for row, values in enumerate(columns):
            for column, value in enumerate(values):
                if value == value:
                    colour = "white" if value > 0.75 else "black"
                    text = f"{value:.2f}".lstrip("0") if value < 1 else "1"
                    centre = {"ha": "center", "va": "center"}
                    axes.text(column, row, text, fontsize=7, color=colour, **centre)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(names)), names if n % across == 0 else [""] * len(names))
        axes.set_title(scheme, fontsize=FONT - 1, color=INK, parse_math=False)
        axes.tick_params(colors=MUTED, length=0, labelsize=8)
        axes.spines[:].set_visible(False)
    for axes in grid.flat[len(maps) :]:
        axes.set_visible(False)
    figure.supxlabel("length", fontsize=8, color=MUTED)
    figure.supylabel(about["groups"], fontsize=8, color=MUTED)
    return figure_svg(f"{label} by {about['groups']}", figure)


def _lines(about: Mapping[str, Any], found: Sequence[Outcome], order: Sequence[str]) -> list[Line]:
    """Medians over seeds, and each seed."""
    lines = []
    lengths = about["eval_lens"]
    for one in found:
        by_length = [one.scores(n) for n in lengths]
        if not all(by_length):
            continue
        middle = [Interval(median(values), math.nan, len(values)) for values in by_length]
        seeds = [list(seed) for seed in zip(*by_length, strict=True)]
        colour = order.index(one.scheme) if one.scheme in order else 0
        lines.append(Line(one.label, lengths, middle, colour, one.before_finetuning, seeds))
    return lines


def _panel(axes: Any, lines: Sequence[Line], about: Mapping[str, Any], title: str) -> None:
    draw(axes, lines, _limits(lines, about), marker=True)
    log_axis(axes, about["eval_lens"], [about["train_len"]])
    if about["chance"] and about["score"] != "loss":
        axes.axhline(about["chance"], color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        # Where lines are high, at the training length; below the mark, if there is room.
        below = about["chance"] > 0.08
        place = {"xytext": (3, -1 if below else 1), "textcoords": "offset points"}
        place["va"] = "top" if below else "bottom"
        at = (about["train_len"], about["chance"])
        axes.annotate("chance", at, fontsize=8, color=MUTED, **place)
    label_ends(axes, lines)
    axes.set_title(title, loc="left", fontsize=FONT, color=MUTED, parse_math=False)
    axes.set_xlabel("length", color=MUTED)
    axes.set_ylabel(_name(about), color=MUTED)


def _dots(axes: Any, lines: Sequence[Line], about: Mapping[str, Any], title: str) -> None:
    draw_dots(axes, lines, _limits(lines, about))
    if about["chance"] and about["score"] != "loss":
        axes.axvline(about["chance"], color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
    axes.set_title(title, loc="left", fontsize=FONT, color=MUTED, pad=20, parse_math=False)
    axes.set_xlabel(_name(about), color=MUTED)


def _limits(lines: Sequence[Line], about: Mapping[str, Any]) -> tuple[float, float]:
    return limits_of(lines) if about["score"] == "loss" else _SHARES


def _name(about: Mapping[str, Any]) -> str:
    """Higher is better goes without saying."""
    return score_name(about).removesuffix(", higher is better")
