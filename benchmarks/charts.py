"""Charts of a page: dots on an axis, one row each, as SVG without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LETTER, _PLOT, _ROW, _HEAD, _FOOT = 7.25, 300, 19, 8, 24  # pixels
_SHAPES = (
    '<circle r="4.5"/>',
    '<path d="M-4-4H4V4H-4Z"/>',
    '<path d="M0-5.5 5 4H-5Z"/>',
    '<path d="M0-5.5 5.5 0 0 5.5-5.5 0Z"/>',
    '<path d="M0 5.5 5-4H-5Z"/>',
    '<path d="M-1.5-5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5V-1.5H-1.5Z"/>',
)

_COLOURS = 5  # of CSS below; no divisor of the number of shapes


@dataclass(frozen=True)
class Chart:
    """Dots of several series in rows, and a line at a value that all are compared with.

    Attributes
    ----------
    rows
        Row -> series -> value. Values that are not finite and positive are left out.
    line
        Where the line stands.
    logarithmic
        Whether equal factors are equally far apart.
    """

    title: str
    rows: Mapping[str, Mapping[str, float]]
    line: float
    logarithmic: bool = True

    def shown(self) -> dict[str, dict[str, float]]:
        """Rows without what cannot be drawn."""
        kept = {
            row: {name: value for name, value in own.items() if 0 < value < math.inf}
            for row, own in self.rows.items()
        }
        return {row: own for row, own in kept.items() if own}


def section(charts: Sequence[Chart]) -> str:
    """A legend and the charts; empty without dots. A series looks the same in all charts."""
    charts = [one for one in charts if one.shown()]
    names = list(dict.fromkeys(k for one in charts for row in one.shown().values() for k in row))
    looks = {name: _look(index) for index, name in enumerate(names)}
    legend = "".join(
        f'<li><svg viewBox="-7 -7 14 14" class="key">{looks[name]}</svg> {html.escape(name)}</li>'
        for name in names
    )
    label = 14 + _LETTER * max((len(row) for one in charts for row in one.shown()), default=0)
    drawn = "".join(_figure(one, looks, label) for one in charts)
    return f'<ul class="legend">{legend}</ul><section>{drawn}</section>' if charts else ""


def _look(index: int) -> str:
    """A colour and a shape; both together repeat after their product."""
    return f'<g class="s{index % _COLOURS}">{_SHAPES[index % len(_SHAPES)]}</g>'


def _figure(chart: Chart, looks: Mapping[str, str], label: float) -> str:
    rows = chart.shown()
    values = [value for own in rows.values() for value in own.values()]
    ticks = _ticks(min(*values, chart.line), max(*values, chart.line), chart.logarithmic)
    scale = math.log if chart.logarithmic else float
    first, last = scale(ticks[0]), scale(ticks[-1])

    def x(value: float) -> float:
        return label + _PLOT * (scale(value) - first) / (last - first)

    bottom = _HEAD + _ROW * len(rows)
    grid = "".join(
        f'<path class="grid" d="M{x(tick):.1f} {_HEAD}V{bottom}"/>'
        f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}">{tick:g}</text>'
        for tick in ticks
    )
    line = f'<path class="line" d="M{x(chart.line):.1f} {_HEAD}V{bottom}"/>'
    body = ""
    for index, (row, own) in enumerate(rows.items()):
        y = _HEAD + _ROW * (index + 0.5)
        dots = "".join(
            f'<g transform="translate({x(value):.1f} {y})"><title>{html.escape(name)}: '
            f"{value:.3g}</title>{looks[name]}</g>"
            for name, value in own.items()
        )
        body += (
            f'<text class="row" x="{label - 10:.1f}" y="{y + 4}">{html.escape(row)}</text>{dots}'
        )
    width, height = round(label + _PLOT + 16), bottom + _FOOT
    return (
        f"<figure><figcaption>{html.escape(chart.title)}</figcaption>"
        f'<svg class="chart" role="img" viewBox="0 0 {width} {height}" width="{width}">'
        f"{grid}{line}{body}</svg></figure>"
    )


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Round values from below the lowest to above the highest: halves, powers of 2 or of 10."""
    if not logarithmic:
        return [n / 2 for n in range(math.floor(2 * low), math.ceil(2 * high) + 1)]
    base = 2.0 if high / low < 2**9 else 10.0
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    return [base**n for n in range(first, max(last, first + 1) + 1)]


CSS = """
:root{--s0:#0072b2;--s1:#c44e00;--s2:#00805a;--s3:#a8467e;--s4:#7a5c00}
@media(prefers-color-scheme:dark){:root{--s0:#5ab4f0;--s1:#f08c46;--s2:#2bc49a;--s3:#e08cc0;
--s4:#d8b84a}}
.s0{fill:var(--s0)}.s1{fill:var(--s1)}.s2{fill:var(--s2)}
.s3{fill:var(--s3)}.s4{fill:var(--s4)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.25rem;padding:0;font-size:.875rem}
.key{width:14px;height:14px;vertical-align:-2px}
figure{margin:1rem 0 0}
figcaption{font-size:.875rem;font-weight:600}
.chart{max-width:100%;height:auto;display:block;font-size:12px}
.chart text{fill:var(--ink)}
.chart .row{text-anchor:end;font-family:ui-monospace,monospace}
.chart .tick{text-anchor:middle;fill:var(--muted)}
.grid{stroke:var(--grid)}
.line{stroke:var(--ink);stroke-width:1.5}
"""
