"""Lines with bands on a pair of axes, labelled at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posenc.study.statistics import SORTED_FROM, Interval

INK, MUTED, GRID = "#1a1a1a", "#6b6b6b", "#e4e4e4"
# Okabe and Ito 2008, safe for the colour-blind; without the yellow, too pale on paper.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_MARKERS = "osD^vPX"
FONT = 10.0  # points
_LABEL = 1.2 * (FONT - 1)  # points between two labels


@dataclass(frozen=True)
class Line:
    """One line of a panel; ``colour`` counts schemes, ``seeds`` are the lines of single seeds."""

    label: str
    x: Sequence[float]
    intervals: Sequence[Interval]
    colour: int
    dashed: bool = False
    seeds: Sequence[Sequence[float]] = ()


def draw(axes: Any, lines: Sequence[Line], limits: tuple[float, float], *, marker: bool) -> None:
    """Lines, the bands of few schemes, and a quiet grid."""
    bands = len({line.colour for line in lines}) < SORTED_FROM  # more would hide one another
    for line in lines:
        colour = PALETTE[line.colour % len(PALETTE)]
        # Lines of one colour have different markers.
        turn = line.colour + line.colour // len(PALETTE)
        shape = _MARKERS[turn % len(_MARKERS)] if marker else None
        low = [i.mean - (i.half_width if i.n > 1 else 0) for i in line.intervals]
        high = [i.mean + (i.half_width if i.n > 1 else 0) for i in line.intervals]
        for seed in line.seeds:
            axes.plot(line.x, seed, color=colour, linewidth=0.6, alpha=0.7)
        if bands and not line.seeds:
            axes.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(
            line.x,
            [i.mean for i in line.intervals],
            color=colour,
            linestyle=(0, (4, 2)) if line.dashed else "-",
            linewidth=1.4 if line.dashed else 1.8,
            marker=None if line.dashed else shape,
            markersize=4.5,
        )
    axes.set_ylim(*limits)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    _quiet(axes)


def draw_dots(axes: Any, lines: Sequence[Line], limits: tuple[float, float]) -> None:
    """Many schemes as rows in the order of ``lines``: one mark per length; small ones are seeds."""
    lengths = sorted({x for line in lines for x in line.x})
    for row, line in enumerate(lines):
        axes.axhline(row, color=GRID, linewidth=0.6, zorder=0.5)
        for x, interval, *seeds in zip(line.x, line.intervals, *line.seeds, strict=True):
            at = lengths.index(x)
            shape = _MARKERS[at % len(_MARKERS)]
            style = {"color": PALETTE[at % len(PALETTE)], "linestyle": "none"}
            axes.plot(seeds, [row] * len(seeds), marker=".", markersize=2.5, alpha=0.7, **style)
            if interval.n:
                axes.plot([interval.mean], [row], marker=shape, markersize=5, **style)
    for at, length in enumerate(lengths):
        shape, colour = _MARKERS[at % len(_MARKERS)], PALETTE[at % len(PALETTE)]
        axes.plot([], [], shape, color=colour, markersize=5, label=f"{length:g}")
    axes.set_yticks(range(len(lines)), [_short(line.label) for line in lines], parse_math=False)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(*limits)
    _quiet(axes)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(lengths), frameon=False,
        fontsize=FONT - 2, handletextpad=0.1, columnspacing=0.8,
    )  # fmt: skip


def dots_height(rows: int) -> float:
    """Height in inches of a panel of dots."""
    return 0.19 * rows + 0.2


def _quiet(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=3, labelsize=FONT - 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)


def log_axis(axes: Any, ticks: Sequence[float], trained: Sequence[int]) -> None:
    """A logarithmic axis of lengths, with multiples of the training length; marks that length."""
    axes.set_xscale("log", base=2)
    per = trained[0] if trained else 0
    names = [f"{tick:g}\n{tick / per:g}×" if per else f"{tick:g}" for tick in ticks]
    axes.set_xticks(ticks, names)
    axes.minorticks_off()
    for length in trained:
        axes.axvline(length, color=MUTED, linewidth=1, linestyle=":", zorder=0.5)
        axes.annotate(
            f"trained at {length}",
            (length, 0.995),
            (3, 0),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=MUTED,
        )


def label_ends(axes: Any, lines: Sequence[Line]) -> None:
    """Label each line at its last finite point; labels that would overlap are moved apart."""
    low, high = axes.get_ylim()
    height = axes.get_position().height * axes.figure.get_figheight() * 72
    ends = []
    for line in lines:
        points = [(x, i.mean) for x, i in zip(line.x, line.intervals, strict=True) if i.n]
        if points:
            ends.append((line, *points[-1]))
    wanted = [(y - low) / (high - low) for _, _, y in ends]
    places = spread(wanted, _LABEL / height)
    for (line, x, y), place in zip(ends, places, strict=True):
        colour = PALETTE[line.colour % len(PALETTE)]
        axes.annotate(
            _short(line.label),
            (x, y),
            (1.05, place),
            textcoords="axes fraction",
            va="center",
            fontsize=FONT - 1,
            color=INK,
            annotation_clip=False,
            parse_math=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 1,
                "linestyle": "--" if line.dashed else "-",
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def _short(label: str) -> str:
    return label if len(label) <= 30 else f"{label[:29]}…"


def label_room(lines: Sequence[Line]) -> float:
    """Width in inches that labels need to the right of a panel."""
    return 0.35 + 0.07 * max((len(_short(line.label)) for line in lines), default=0)


def label_height(lines: Sequence[Line]) -> float:
    """Height in inches of a panel whose labels do not overlap, with some room to move."""
    return 1.15 * len(lines) * _LABEL / 72


def limits_of(lines: Sequence[Line]) -> tuple[float, float]:
    """Limits by means alone: the wide interval of one scheme must not flatten the others."""
    means = [i.mean for line in lines for i in line.intervals if i.n]
    if not means:
        return 0.0, 1.0
    room = 0.06 * (max(means) - min(means)) or 0.1
    return min(means) - room, max(means) + room


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """The positions in 0..1 nearest to ``wanted``, in the same order, at least ``gap`` apart."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    pools: list[list[float]] = []
    for rank, index in enumerate(order):
        pools.append([wanted[index] - rank * gap])
        # Labels that would cross are moved together: the least squares of isotonic regression.
        while len(pools) > 1 and _mean(pools[-2]) >= _mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    level = [_mean(pool) for pool in pools for _ in pool]
    highest = max(0.0, 1 - gap * (len(wanted) - 1))
    places = [0.0] * len(wanted)
    for rank, index in enumerate(order):
        places[index] = min(max(level[rank], 0.0), highest) + rank * gap
    return places


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
