"""One HTML page of asv's results, without scripts or external files, that opens from disk."""

from __future__ import annotations

import ast
import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import charts
from asv.config import Config
from asv.results import Results
from comparisons import drift, errors, exponents, peers, ratios
from figures import Benchmark, Figure, load

_HERE = Path(__file__).resolve().parent
_PEERS_RESULT = _HERE / "results" / "peers-cpu.json"


def write_page(conf: Config, history: Sequence[Results]) -> tuple[Path, list[str]]:
    """Write ``dashboard.html`` next to asv's own pages, from results whose last is shown.

    Returns
    -------
    The page, and the name of each benchmark of the last commit that failed.
    """
    benchmarks, last = load(conf, history), history[-1]
    page = Path(conf.html_dir) / "dashboard.html"
    page.write_text(_page(benchmarks, history), encoding="utf-8")
    return page, [one.name for one in benchmarks if one.failed(last.commit_hash)]


def _page(benchmarks: Sequence[Benchmark], history: Sequence[Results]) -> str:
    commit = history[-1].commit_hash
    shown = [one for one in benchmarks if one.applies(commit)]
    machine = drift(shown, commit)
    modules = itertools.groupby(shown, lambda one: one.name.split(".")[0])
    sections = "".join(
        f"<h2>{html.escape(module)}</h2><p>{html.escape(_docstring(module))}.</p>"
        f"<section>{''.join(_table(one, commit, machine) for one in some)}</section>"
        for module, some in modules
    )
    links = " ".join(f'<a href="#{_id(one.name)}">{html.escape(one.name)}</a>' for one in shown)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Benchmarks of posenc at {commit[:8]}</title>"
        f"<style>{_CSS}{charts.CSS}</style></head><body><main><h1>Benchmarks of posenc</h1>"
        f"{_summary(shown, history)}{_drawn(shown, commit)}"
        f"<h2>Figures</h2><p>{_READING}</p><nav>{links}</nav>{sections}</main></body></html>\n"
    )


def _drawn(shown: Sequence[Benchmark], commit: str) -> str:
    """Sections of charts; those without figures are left out."""
    sections = (
        ("Ratios to attention without positions", _RATIOS, ratios(shown, commit)),
        ("Ratios to other libraries", _PEERS, peers(_PEERS_RESULT)),
        ("Growth with the length", _EXPONENTS, exponents(shown, commit)),
        ("Errors", _ERRORS, errors(shown, commit)),
    )
    return "".join(
        f"<h2>{title}</h2><p>{about}</p>{drawn}"
        for title, about, some in sections
        if (drawn := charts.section(some))
    )


def _summary(shown: Sequence[Benchmark], history: Sequence[Results]) -> str:
    last, earlier = history[-1], {one.commit_hash for one in history[:-1]}
    before = len(earlier - {last.commit_hash})
    figures = [one for benchmark in shown for one in benchmark.figures.values()]
    there = [one.values.get(last.commit_hash, math.nan) for one in figures]
    failed = sum(value is None for value in there)
    served = len(there) - failed - sum(value is not None and math.isnan(value) for value in there)
    facts = {
        "Commit": f"{last.commit_hash} of {_day(last.date)}",
        "Machine": "{cpu}, {num_cpu} CPUs, {os}, {arch}".format_map(last.params),
        "Python": last.params["python"],
        "Measured": f"{served} figures of {len(shown)} benchmarks, {failed} failed; took "
        f"{sum(filter(None, last.duration.values())):.0f} s",
        "History": f"{before} earlier measured on this machine and processor"
        if before
        else "nothing measured before on this machine, so no change is shown",
    }
    rows = "".join(f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
    return f"<dl>{rows}</dl><p>{_PAGES}</p>"


def _day(milliseconds: float) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d}"


def _table(benchmark: Benchmark, commit: str, machine: Mapping[str, float]) -> str:
    """Rows are the first param, columns the others; params with one value go into the caption."""
    first, *others = (*benchmark.params, *[""] * (not benchmark.params))
    every = benchmark.params.get(first, [""])
    columns = [
        choice
        for choice in itertools.product(*(benchmark.params[name] for name in others))
        if any(_at(benchmark, row, choice).applies(commit) for row in every)
    ]
    rows = [
        row for row in every if any(_at(benchmark, row, one).applies(commit) for one in columns)
    ]
    varying = [index for index, name in enumerate(others) if len(benchmark.params[name]) > 1]
    heads = [" ".join(choice[index] for index in varying) for choice in columns]
    most = max(_numbers(benchmark, commit), default=0.0)
    body = "".join(
        f"<tr><th>{html.escape(row)}</th>"
        + "".join(_cell(_at(benchmark, row, choice), commit, most, machine) for choice in columns)
        + "</tr>"
        for row in rows
    )
    head = "".join(f"<th>{html.escape(text)}</th>" for text in (first, *heads))
    return (
        f'<div class="scroll"><h3 id="{_id(benchmark.name)}">{html.escape(benchmark.name)}</h3>'
        f'<p class="about">{html.escape(_about(benchmark))}</p><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _at(benchmark: Benchmark, row: str, choice: tuple[str, ...]) -> Figure:
    return benchmark.figures[(row, *choice) if benchmark.params else ()]


def _about(benchmark: Benchmark) -> str:
    """The docstring of the class, and the params with one value."""
    fixed = [f"{name} {v[0]}" for name, v in benchmark.params.items() if len(v) == 1]
    return "; ".join(filter(None, [_docstring(benchmark.name), ", ".join(fixed)]))


def _docstring(name: str) -> str:
    """Docstring of a module of the suite or of a class in it, without importing the suite."""
    module, *inside = name.split(".")
    tree = ast.parse((_HERE / "suite" / f"{module}.py").read_text(encoding="utf-8"))
    owners = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name in inside]
    text = ast.get_docstring(owners[0] if owners else tree) or ""
    return " ".join(text.replace("``", "").split()).rstrip(".")


def _numbers(benchmark: Benchmark, commit: str) -> Iterator[float]:
    every = (one.number(commit) for one in benchmark.figures.values())
    return (value for value in every if math.isfinite(value))


def _cell(figure: Figure, commit: str, most: float, machine: Mapping[str, float]) -> str:
    if not figure.applies(commit):
        return '<td class="none">–</td>'
    value = figure.values[commit]
    if value is None:
        return '<td class="worse">failed</td>'
    title = "\n".join(f"{one[:8]}: {figure.text(one)}" for one in figure.values)
    return (
        f'<td data-value="{value!r}" title="{html.escape(title)}">'
        f'<i style="width:{100 * min(value / most, 1) if most else 0:.1f}%"></i>'
        f"{html.escape(figure.text(commit))}{_change(figure, commit, machine)}{_line(figure)}</td>"
    )


def _change(figure: Figure, commit: str, machine: Mapping[str, float]) -> str:
    """Change against the previous commit, if the two 99 % intervals do not overlap.

    A time counts over that of the frameworks' own attention in the same run.
    """
    before = [one for one in figure.values if one != commit][-1:]
    if not before or not (figure.values[before[0]] or 0) > 0:
        return ""
    then, now = (_interval(figure.stats[one]) for one in (before[0], commit))
    slower = machine.get(before[0], 1.0) if figure.unit == "seconds" else 1.0
    now = now[0] / slower, now[1] / slower
    if then[0] <= now[1] and now[0] <= then[1]:
        return ""
    ratio = figure.values[commit] / figure.values[before[0]] / slower
    percent = f"{100 * (ratio - 1):+.0f} %".replace("-", "−")
    return f' <b class="{"worse" if ratio > 1 else "better"}">{percent}</b>'


def _interval(stats: Mapping[str, float] | None) -> tuple[float, float]:
    if not stats or stats.get("ci_99_a") is None:
        return -math.inf, math.inf
    return stats["ci_99_a"], stats["ci_99_b"]


def _line(figure: Figure) -> str:
    """A line of the value over all commits."""
    values = [v for v in map(figure.number, figure.values) if math.isfinite(v)]
    if len(values) < 2 or max(values) <= 0:
        return ""
    step, most = 56 / (len(values) - 1), max(values)
    points = " ".join(f"{2 + i * step:.1f},{15 - 13 * v / most:.1f}" for i, v in enumerate(values))
    return f' <svg viewBox="0 0 60 17"><polyline points="{points}"/></svg>'


def _id(name: str) -> str:
    return html.escape(name.replace(".", "-"), quote=True)


_PAGES = (
    "Over the commits: <a href='index.html'>asv's own pages</a>. A figure holds for this machine "
    "and its load at the time."
)
_RATIOS = (
    "Time of causal attention with a scheme, over that of the framework's own attention without "
    "positions at the same length: 1 is the line. Both were measured in one run, not in "
    "alternating calls."
)
_PEERS = (
    "Time of posenc over that of a library that computes the same, from "
    "<code>benchmarks/results/peers-cpu.json</code>: left of 1, the line, posenc is faster."
)
_EXPONENTS = "Exponents of time and memory: 1, the line, is linear; 2 is quadratic."
_ERRORS = (
    "The largest error of float32 against float64, in spacings of the largest value: 0.5, the "
    "line, is correct rounding. An exact result has no dot."
)
_READING = (
    "Medians of warm calls; with --quick one call each. Calls on one thread are timed in processor "
    "time, the others and whole processes in wall time. A bar compares the figures of one table. A "
    "percentage is the change against the previous commit, shown where the two 99 % intervals do "
    "not overlap; of a time, relative to the frameworks' own attention in the same two runs, which "
    "is what the machine did. A line shows all commits measured on this machine, from zero. A "
    "dash: not supported here."
)
_CSS = """
:root{--ink:#1a1a1a;--muted:#666;--grid:#e2e2e2;--paper:#fff;--bar:#0072b233;--worse:#b34a00;
--better:#00734f}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--muted:#a0a0a0;--grid:#33373c;
--paper:#15181c;--bar:#4aa8e055;--worse:#f08246;--better:#2bc49a}}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:72rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.6rem;margin:.5rem 0}
h2{font-size:1.25rem;margin:2.5rem 0 0;border-bottom:1px solid var(--grid)}
h3{font-size:1rem;margin:1.5rem 0 0;font-family:ui-monospace,monospace}
p{max-width:46rem}
.about{color:var(--muted);font-size:.875rem;margin:.2rem 0 .5rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;font-size:.9rem}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
nav{font-size:.875rem;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
a{color:inherit}
section{display:flex;flex-wrap:wrap;gap:0 2.5rem}
.scroll{overflow-x:auto;max-width:100%}
.about{max-width:34rem}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .75rem;text-align:right;white-space:nowrap;font-weight:400}
th:first-child{text-align:left;padding-left:0;position:sticky;left:0;background:var(--paper)}
thead th{color:var(--muted);border-bottom:1px solid var(--grid)}
td{position:relative;isolation:isolate;min-width:6rem}
td i{position:absolute;z-index:-1;left:0;bottom:0;height:100%;max-width:100%;background:var(--bar)}
.none{color:var(--muted)}
.worse{color:var(--worse)}
.better{color:var(--better)}
td svg{width:60px;height:17px;vertical-align:middle}
polyline{fill:none;stroke:currentColor;stroke-width:1.5}
"""
