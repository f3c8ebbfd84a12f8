"""Markdown, for a summary of a job or a comment: a table of subjects, then what differs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posenc.audit.expected import Judged
from posenc.audit.outputs.run import (
    Run,
    absent,
    conditions,
    counted,
    failures,
    in_words,
    measured,
    number,
    one_line,
    ran_groups,
    title,
    verdict,
)
from posenc.audit.record import Record

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~$@!])")


def write(records: Sequence[Record], judged: Judged, run: Run) -> str:
    """A verdict, a table with a row for each subject, a section for each difference."""
    wrong = list(failures(records, judged))
    parts = [
        "## posenc audit",
        f"**{verdict(records, judged)}** {_escape(in_words(counted(records, judged)))}.",
        *(f"- {_escape(text)}" for text in (*judged.errors, *judged.notes)),
        _table(records, judged),
        *(_section(record) for record in wrong),
        *_expected(records, judged),
        _small_print(run),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(records: Sequence[Record], judged: Judged) -> str:
    rows = [
        [
            " ".join(filter(None, (group.library, group.version))),
            group.subject,
            in_words(counted(group.records, judged)),
            number(max(errors, default=None)),
        ]
        for group in ran_groups(records)
        for errors in [[r.error for r in group.records if r.error is not None]]
    ]
    if not rows:
        return _escape(absent(records))
    head = ["library", "subject", "checks", "largest error"]
    lines = [head, [":--", ":--", ":--", "--:"], *([_escape(cell) for cell in row] for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(filter(None, (table, _escape(absent(records)))))


def _section(record: Record) -> str:
    facts = ", ".join(filter(None, (record.status, measured(record))))
    parts = [
        f"### {_escape(title(record))}",
        f"{_escape(conditions(record))}: {_escape(one_line(record.message))}",
        _escape(facts),
        _code(one_line(record.reproducer), "python") if record.reproducer else "",
        f"Name in a file of expected failures:\n\n{_code(one_line(record.name), 'text')}",
    ]
    return "\n\n".join(filter(None, parts))


def _expected(records: Sequence[Record], judged: Judged) -> list[str]:
    """The expected failures, folded away."""
    lines = [
        f"- {_escape(record.name)}: {_escape(judged.reason(record))}"
        for record in records
        if judged.expects(record)
    ]
    if not lines:
        return []
    return [
        f"<details><summary>{len(lines)} expected failures</summary>",
        "\n".join(lines),
        "</details>",
    ]


def _small_print(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"{_code(run.command, 'console')}\n\n{_escape(f'{versions}; {run.platform}')}"


def _code(text: str, language: str) -> str:
    """A block of code whose fence is longer than any in it."""
    longest = max((len(found) for found in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", one_line(text))
