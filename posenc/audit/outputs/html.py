"""HTML: one file without scripts, for screens, phones, print and dark mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from posenc.audit.expected import Judged
from posenc.audit.outputs.run import (
    EXPECTED,
    ORDER,
    Group,
    Run,
    absent,
    conditions,
    counted,
    failures,
    in_words,
    measured,
    number,
    one_line,
    place,
    ran_groups,
    title,
    verdict,
)
from posenc.audit.record import Record
from posenc.study.page import colours, page
from posenc.study.panels import PALETTE

_CLASSES = {"differs": "bad", "not called": "bad", "agrees": "good", EXPECTED: "known"}
_HEAD = ("check", "scheme", "path", "dtype", "found", "first at", "error", "tolerance")


def write(records: Sequence[Record], judged: Judged, run: Run) -> str:
    """The verdict, subjects in a table, each difference, and all checks of each subject, folded.

    All text of records is escaped, and nothing comes from the network.
    """
    counts = counted(records, judged)
    parts = [
        f'<h1>posenc audit</h1><p class="headline">{escape(verdict(records, judged))}</p>',
        f"<p>{_counts(counts)}</p>",
        *(f'<p class="error">{_text(text)}</p>' for text in judged.errors),
        *(f'<p class="note">{_text(text)}</p>' for text in judged.notes),
        _subjects(records, judged),
        *_differences(records, judged),
        *_expected(records, judged),
        *_all_checks(records, judged),
        _conditions(run, records),
    ]
    return page(f"posenc audit: {in_words(counts)}", "".join(parts), _style())


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(
        f'<span class="{_CLASSES.get(status, "quiet")}">{escape(in_words({status: n}))}</span>'
        for status, n in counts.items()
    )


def _subjects(records: Sequence[Record], judged: Judged) -> str:
    rows = "".join(
        f'<tr><th scope="row"><a href="#s{i}">{_text(group.title)}</a></th>'
        f"<td>{_counts(counted(group.records, judged))}</td></tr>"
        for i, group in enumerate(ran_groups(records))
    )
    table = f'<div class="scroll"><table class="subjects">{rows}</table></div>' if rows else ""
    return f'<h2>Subjects</h2>{table}<p class="note">{_text(absent(records))}</p>'


def _differences(records: Sequence[Record], judged: Judged) -> Iterator[str]:
    wrong = list(failures(records, judged))
    if not wrong:
        return
    yield "<h2>What differs, or could not be called</h2>"
    for record in wrong:
        facts = measured(record)
        yield (
            f'<section class="difference"><h3>{_text(title(record))}: '
            f'<span class="bad">{escape(record.status)}</span></h3>'
            f'<p class="note">{_text(conditions(record))}</p><p>{_text(record.message)}</p>'
            + (f'<p class="note">{_text(facts)}</p>' if facts else "")
            + (f"<pre>{_text(record.reproducer)}</pre>" if record.reproducer else "")
            + f"<details><summary>name</summary><pre>{_text(record.name)}</pre></details></section>"
        )


def _expected(records: Sequence[Record], judged: Judged) -> Iterator[str]:
    known = [record for record in records if judged.expects(record)]
    if known:
        items = "".join(
            f"<li>{_text(record.name)}: {_text(judged.reason(record))}</li>" for record in known
        )
        yield f'<h2>Expected failures</h2><ul class="names">{items}</ul>'


def _all_checks(records: Sequence[Record], judged: Judged) -> Iterator[str]:
    if ran_groups(records):
        yield "<h2>All checks</h2>"
    for i, group in enumerate(ran_groups(records)):
        counts = counted(group.records, judged)
        yield (
            f'<details id="s{i}"><summary>{_text(group.title)}: {_counts(counts)}</summary>'
            f"{_checks(group, judged)}</details>"
        )


def _checks(group: Group, judged: Judged) -> str:
    ordered = sorted(group.records, key=lambda record: ORDER.index(record.status))
    rows = "".join(_row(record, judged) for record in ordered)
    head = "".join(f'<th scope="col">{name}</th>' for name in _HEAD)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div>"
    )


def _row(record: Record, judged: Judged) -> str:
    status = EXPECTED if judged.expects(record) else record.status
    said = in_words({status: 1}).removeprefix("1 ")
    words = f"{said}: {record.message}" if status == "cannot express" and record.message else said
    cells = [
        *map(_text, (record.scheme, record.path, record.dtype)),
        f'<span class="{_CLASSES.get(status, "quiet")}">{_text(words)}</span>',
        *map(_text, (place(record), number(record.error), number(record.tolerance))),
    ]
    rest = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{_text(record.check)}</th>{rest}</tr>'


def _conditions(run: Run, records: Sequence[Record]) -> str:
    versions = {**run.versions, **{r.library: r.version for r in records if r.version}}
    known = {"command": run.command, "grid": run.grid, "time": f"{run.time} UTC"}
    known |= {"seconds": f"{run.seconds:.1f}", "platform": run.platform, **versions}
    entries = "".join(f"<dt>{_text(name)}</dt><dd>{_text(v)}</dd>" for name, v in known.items())
    return f"<h2>Versions and machine</h2><dl>{entries}</dl>"


def _text(text: str) -> str:
    return escape(one_line(text))


def _style() -> str:
    light = {"code": "#f4f4f4", "good": "#00785a", "bad": "#b34700", "known": PALETTE[0]}
    dark = {"code": "#20242a", "good": "#2bc49a", "bad": "#f08246", "known": "#4aa8e0"}
    return f"{colours(light, dark)}{_CSS}"


_CSS = """
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:68rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.15rem;margin:2.5rem 0 .5rem}
h3{font-size:1rem;margin:0}
p,li{max-width:46rem;overflow-wrap:anywhere}
h3,summary,dd,.error{overflow-wrap:anywhere}
a{color:inherit}
.headline{font-size:1.15rem;line-height:1.5}
.note,.quiet{color:var(--muted)}
.note{font-size:.875rem}
.good{color:var(--good)}
.bad,.error{color:var(--bad)}
.known{color:var(--known)}
.difference{border-left:3px solid var(--bad);padding-left:1rem;margin:1.5rem 0}
.difference p{margin:.3rem 0}
.names{padding-left:1.2rem;font-size:.9rem}
pre{overflow-x:auto;font-size:.85rem;background:var(--code);padding:.6rem .75rem;margin:.5rem 0}
details{margin:.5rem 0}
summary{cursor:pointer}
.scroll{overflow-x:auto;margin:.5rem 0 1.25rem}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem 1rem .25rem 0;text-align:left;vertical-align:top}
td{min-width:4rem}
.subjects th{overflow-wrap:anywhere;min-width:9rem}
th{font-weight:500}
thead th{border-bottom:1px solid var(--muted);font-weight:600}
tbody tr+tr>*{border-top:1px solid var(--grid)}
dl{display:grid;grid-template-columns:fit-content(40%) 1fr;gap:.2rem 1rem;font-size:.9rem}
dt{color:var(--muted)}
dd{margin:0}
@media print{.scroll{overflow:visible}}
"""
