"""The files of a probe: table, report, numbers and figures, moved into place together."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posenc.probe.figures import figures
from posenc.probe.tables import Records, failures, headline, not_had, results_csv, tables
from posenc.study.outputs import publish
from posenc.study.page import definitions, page
from posenc.study.picture import FORMATS, encode
from posenc.study.plots import figure_svg
from posenc.study.results import write_whole
from posenc.study.table import Table, escape_markdown, wrap

_HEADINGS = {
    "loss": "Loss by length",
    "position": "Loss by position in the longest windows",
    "passkey": "Passkeys by length and depth: share of prompts whose key is right",
    "attention": "Mean distance of attention by layer and head",
}
_CAVEATS = (
    "One model and one text: a difference between two schemes holds for these weights, which were "
    "trained with one of them.",
    "Non-overlapping windows favour longer windows: fewer of their targets have little context to "
    "their left (the early-token curse). The same targets do not change with the length, so a loss "
    "that falls there shows that the model uses more context.",
    "A passkey that is found shows that attention reaches it, not that the model uses what it "
    "reads there. A model that was not trained to answer questions may find none at any length.",
    "Bits per token of models with different tokenizers do not compare; bits per byte do.",
)


def text(summary: Mapping[str, Any], records: Records, width: int | None = None) -> str:
    """For a terminal: all tables."""
    parts = [table.text(width) for table in tables(summary, records)]
    return "\n\n".join([*parts, *(wrap(line, width) for line in _lines(summary, records))])


def write(
    out: Path, summary: dict[str, Any], records: Sequence[dict[str, Any]], runs: Iterable[str]
) -> tuple[list[str], Path | None]:
    """Write all files into ``out``, or none; those of another probe or study go to ``earlier/``.

    Returns their names, and the folder of the earlier ones or None.
    """

    def render(folder: Path) -> None:
        lines = [json.dumps(record, sort_keys=True) + "\n" for record in records]
        write_whole(folder / "results.jsonl", "".join(lines))
        write_whole(folder / "results.csv", results_csv(records))
        shown = tables(summary, records)
        parts = [table.markdown() for table in shown]
        said = map(escape_markdown, _lines(summary, records))
        write_whole(folder / "table.md", "\n\n".join([*parts, *said]) + "\n")
        drawn = figures(summary, records)
        for name, figure in drawn.items():
            for form in FORMATS:
                (folder / f"{name}.{form}").write_bytes(encode(figure, form))
        svgs = {name: figure_svg(_HEADINGS[name], figure) for name, figure in drawn.items()}
        write_whole(folder / "report.html", _report(summary, records, shown, svgs))

    return publish(out, summary, records, runs, render)


def _lines(summary: Mapping[str, Any], records: Records) -> list[str]:
    said = headline(summary, records)
    lost = [f"failed: {line}" for line in failures(records)]
    return [*([said] if said else []), *_notes(summary, records), *lost]


def _notes(summary: Mapping[str, Any], records: Records) -> list[str]:
    return [*summary["notes"], *not_had(records)]


def _report(
    summary: Mapping[str, Any], records: Records, shown: Sequence[Table], svgs: Mapping[str, str]
) -> str:
    lost = "".join(f"<li>{html.escape(line)}</li>" for line in failures(records))
    notes = "".join(f"<p>{html.escape(line)}</p>" for line in _notes(summary, records))
    said = f'<p class="headline">{html.escape(headline(summary, records))}</p>'
    command = f"<pre>{html.escape(summary['command'])}</pre>" if summary["command"] else ""
    drawn = "".join(
        f'<h2>{heading}</h2><figure style="max-width:none">{svgs[name]}</figure>'
        for name, heading in _HEADINGS.items()
        if name in svgs
    )
    own = "".join(table.html() for table in shown)
    caveats = "".join(f"<li>{html.escape(line)}</li>" for line in _CAVEATS)
    parts = {
        "Setting": summary["setting"],
        "Text": summary["corpus"],
        "Model and machine": summary["versions"],
    }
    entries = "".join(f"<h2>{title}</h2><dl>{definitions(of)}</dl>" for title, of in parts.items())
    failed = f'<section class="failed"><h2>Failures</h2><ul>{lost}</ul></section>' if lost else ""
    body = (
        f"<h1>{html.escape(summary['title'])}</h1>{said}{notes}{command}{failed}{drawn}"
        f"<h2>Tables</h2>{own}<h2>Read with care</h2><ul>{caveats}</ul>{entries}"
    )
    return page(summary["title"], body)
