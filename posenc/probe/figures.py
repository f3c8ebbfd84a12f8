"""The figures of a probe: loss by length and by position, passkeys, distances of attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posenc.probe.measures import rate
from posenc.probe.tables import Records, by_length, passkey_scores, rows
from posenc.study.panels import (
    FONT,
    INK,
    MUTED,
    Line,
    draw,
    label_ends,
    label_height,
    label_room,
    limits_of,
    log_axis,
)
from posenc.study.statistics import Interval

NAMES = ("attention", "loss", "passkey", "position")
_ACROSS = 3  # heat maps in a row
_PANELS = {
    "bits": "Non-overlapping windows",
    "last_bits": "Same targets, growing context",
    "key_bits": "Key tokens",
}


def figures(summary: Mapping[str, Any], records: Records) -> dict[str, Any]:
    """The figures that have something to show, by the name of their files."""
    found = {
        "loss": _loss(summary, records),
        "position": _position(records),
        "passkey": _passkey(records),
        "attention": _attention(records),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _loss(summary: Mapping[str, Any], records: Records) -> Any:
    panels = {}
    for what, title in _PANELS.items():
        lines = []
        for colour, row in enumerate(rows(records)):
            points = {n: rate(r, what) for n, r in by_length(records, row, "text").items()}
            points = {n: value for n, value in points.items() if not math.isnan(value)}
            if points:
                lines.append(_line(row, list(points), list(points.values()), colour))
        if lines:
            panels[title] = lines
    if not panels:
        return None
    from matplotlib.figure import Figure

    every = [line for lines in panels.values() for line in lines]
    room, left, plot = label_room(every), 0.85, 3.0
    width = len(panels) * (left + plot + room)
    height = max(4.0, label_height(every[: len(rows(records))]) / 0.7)
    figure = Figure(figsize=(width, height), dpi=160)
    lengths = list(summary["setting"]["eval_lens"])
    for index, (title, lines) in enumerate(panels.items()):
        start = (index * (left + plot + room) + left) / width
        axes = figure.add_axes((start, 0.14, plot / width, 0.76))
        draw(axes, lines, limits_of(lines), marker=True)
        log_axis(axes, lengths, [])
        _slanted(axes, lengths)
        label_ends(axes, lines)
        axes.set_title(title, loc="left", fontsize=FONT, color=MUTED)
        axes.set_xlabel("length (tokens)", color=MUTED)
        if not index:
            axes.set_ylabel("bits per token (lower is better)", color=MUTED)
    return figure


def _slanted(axes: Any, lengths: Sequence[int]) -> None:
    """Many lengths, or long numbers, would run into one another."""
    if sum(len(str(n)) + 2 for n in lengths) > 40:
        axes.tick_params(axis="x", labelrotation=45)


def _position(records: Records) -> Any:
    lines = []
    for colour, row in enumerate(rows(records)):
        own = by_length(records, row, "text")
        if own:
            record = own[max(own)]
            ends = [0, *record["edges"]]
            centres = [(a + b) / 2 for a, b in itertools.pairwise(ends)]
            lines.append(_line(row, centres, record["by_position"], colour))
    if not lines:
        return None
    from matplotlib.figure import Figure

    room, left = label_room(lines), 0.85
    width, height = 6.4 + room, max(4.0, label_height(lines) / 0.76)
    figure = Figure(figsize=(width, height), dpi=160)
    axes = figure.add_axes((left / width, 0.14, 5.6 / width, 0.78))
    draw(axes, lines, limits_of(lines), marker=False)
    longest = int(2 * max(line.x[-1] for line in lines))
    log_axis(axes, [2**n for n in range(0, longest.bit_length(), 2)], [])
    label_ends(axes, lines)
    axes.set_xlabel("position in the longest windows (tokens)", color=MUTED)
    axes.set_ylabel("bits per token (lower is better)", color=MUTED)
    return figure


def _line(row: str, x: Sequence[float], y: Sequence[float], colour: int) -> Line:
    return Line(row, x, [Interval(value, math.nan, 1) for value in y], colour)


def _passkey(records: Records) -> Any:
    maps = {}
    for row in rows(records):
        found = {n: passkey_scores(r) for n, r in by_length(records, row, "passkey").items()}
        known = {n: scores for n, scores in found.items() if scores is not None}
        if known:
            maps[row] = known
    if not maps:
        return None
    figure, grid = _grid(maps, each=0.24 * max(len(s) for m in maps.values() for s in m.values()))
    for axes, (row, columns) in zip(grid, maps.items(), strict=False):
        values = np.array(list(columns.values())).T
        axes.imshow(values, cmap="Greys", vmin=-0.1, vmax=1.25, aspect="auto")
        for (down, across), value in np.ndenumerate(values):
            shade = "white" if value > 0.75 else "black"
            text = f"{value:.2f}".lstrip("0") if value < 1 else "1"
            axes.text(across, down, text, fontsize=7, color=shade, ha="center", va="center")
        depths = len(values)
        shares = np.linspace(0, 100, depths) if depths > 1 else [50]
        axes.set_yticks(range(depths), [f"{share:.0f} %" for share in shares])
        axes.set_xticks(range(len(columns)), list(columns))
        _slanted(axes, [10 ** len(str(n)) for n in columns])
        _named(axes, row)
    figure.supxlabel("length (tokens)", fontsize=8, color=MUTED)
    figure.supylabel("depth of the key", fontsize=8, color=MUTED)
    return figure


def _attention(records: Records) -> Any:
    maps = {
        row: np.array(record["distances"])
        for row in rows(records)
        for record in by_length(records, row, "attention").values()
        if record["distances"] is not None
    }
    if not maps:
        return None
    most = max(float(each.max()) for each in maps.values())
    layers = max(len(each) for each in maps.values())
    figure, grid = _grid(maps, each=max(1.2, min(6.0, 0.2 * layers)))
    image: Any = None
    for axes, (row, values) in zip(grid, maps.items(), strict=False):
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=most, aspect="auto")
        for axis, count in ((axes.xaxis, values.shape[1]), (axes.yaxis, values.shape[0])):
            axis.set_ticks(range(0, count, max(1, count // 8)))
        _named(axes, row)
    figure.colorbar(image, ax=list(grid), pad=0.02).set_label("mean distance (tokens)", fontsize=8)
    figure.supxlabel("head", fontsize=8, color=MUTED)
    figure.supylabel("layer", fontsize=8, color=MUTED)
    return figure


def _grid(maps: Mapping[str, Any], each: float) -> tuple[Any, Any]:
    """A figure and the axes of its maps."""
    from matplotlib.figure import Figure

    across = min(_ACROSS, len(maps))
    down = -(-len(maps) // across)
    width = 2.2 + 2.6 * across
    figure = Figure(figsize=(width, down * (each + 0.7) + 0.4), dpi=160, layout="constrained")
    grid: Any = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(maps) :]:
        axes.set_visible(False)
    return figure, grid.flat[: len(maps)]


def _named(axes: Any, row: str) -> None:
    axes.set_title(row, fontsize=FONT - 1, color=INK, parse_math=False)
    axes.tick_params(colors=MUTED, length=0, labelsize=8)
    axes.spines[:].set_visible(False)
