"""A page of HTML with the style of a report, and lists of names and values on it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

from posenc.study.panels import GRID, INK, MUTED, PALETTE

_DARK = ("#4aa8e0", "#f08246", "#2bc49a", "#dd9abb", "#efb73e", "#8fd0f5", "#a8a8a8")


def page(title: str, body: str, style: str | None = None) -> str:
    """A page of HTML; ``body`` is HTML, ``title`` is text. ``style`` is by default a report's."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{_style() if style is None else style}</style>"
        f"</head><body><main>{body}</main></body></html>\n"
    )


def definitions(values: Mapping[str, Any]) -> str:
    """The items of a list of definitions; values that are no text as JSON."""
    return "".join(
        f"<dt>{html.escape(str(name))}</dt><dd>{html.escape(_value(value))}</dd>"
        for name, value in values.items()
    )


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _style() -> str:
    light = {f"line-{index}": colour for index, colour in enumerate(PALETTE)}
    dark = {f"line-{index}": colour for index, colour in enumerate(_DARK)}
    return f"{colours(light, dark)}{_CSS}"


def colours(light: dict[str, str], dark: dict[str, str]) -> str:
    """CSS variables of all pages, and more of one's own, by day and by night."""
    by_day = {"ink": INK, "muted": MUTED, "grid": GRID, "paper": "#ffffff"} | light
    by_night = {"ink": "#e8e8e8", "muted": "#a0a0a0", "grid": "#33373c", "paper": "#15181c"} | dark
    day, night = ("".join(f"--{k}:{v};" for k, v in one.items()) for one in (by_day, by_night))
    return f":root{{{day}}}@media(prefers-color-scheme:dark){{:root{{{night}}}}}"


_CSS = """
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:68rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.15rem;margin:2.5rem 0 .5rem}
p,li{max-width:46rem}
.part{font-size:1.35rem;margin-top:3.5rem}
.headline{font-size:1.15rem;line-height:1.5}
.note{color:var(--muted);font-size:.875rem}
.failed{border-left:3px solid var(--line-1);padding-left:1rem;overflow-wrap:anywhere}
.failed h2{margin-top:1rem}
pre{overflow-x:auto;font-size:.85rem}
.pair{display:flex;flex-wrap:wrap;gap:1rem}
.pair figure{flex:1 1 24rem}
figure{margin:0;max-width:40rem;min-width:0}
svg{width:100%;height:auto;display:block;font-family:system-ui,sans-serif}
svg *{stroke-linejoin:round}
.scroll{overflow-x:auto;margin:1.25rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--muted);padding-bottom:.4rem;max-width:calc(100vw - 3.5rem)}
th,td{padding:.25rem .75rem;text-align:right;white-space:nowrap}
th:first-child{text-align:left;padding-left:0;position:sticky;left:0;background:var(--paper)}
thead th{border-bottom:1px solid var(--muted);font-weight:600}
tbody th{font-weight:500}
tbody tr+tr>*{border-top:1px solid var(--grid)}
tr.minor>*{border-top-color:transparent!important}
tr.minor th{color:var(--muted);padding-left:1rem}
dl{display:grid;grid-template-columns:fit-content(40%) 1fr;gap:.2rem 1rem;font-size:.9rem}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
.better,.falls{color:var(--line-2)}
.worse,.rises{color:var(--line-1)}
.tie{color:var(--muted)}
.wrong{color:#fff;background:#c00;font-weight:700}
@media print{.scroll{overflow:visible}}
"""
