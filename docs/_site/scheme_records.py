"""A scheme's rows in the pages of the study, the tasks and exactness."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from markdown_parts import table
from scheme_facts import DOCS


@cache
def _text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def tables_of(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Heads and rows of each table of a text in Markdown."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [
            [c.strip() for c in line.strip("| \n").split(" | ")] for line in block.splitlines()
        ]
        yield lines[0], lines[2:]


def _is_of(label: str, name: str) -> bool:
    base = label.partition(",")[0]
    return base == name or base.endswith(f"~{name}")


def study(name: str) -> str:
    """Its rows in the tables of the whole catalogue, of non-overlapping windows."""
    section = _text("compare.md").partition("## The whole catalogue")[2]
    parts = re.split(r"^### Schemes that came later$", section, flags=re.MULTILINE)
    tables = [next(tables_of(part)) for part in parts]
    heads, own = tables[0][0], [row for _, rows in tables for row in rows if _is_of(row[0], name)]
    if not own:
        return "Not in the [study's table](../compare.md), which is older than this scheme."
    intro = (
        "Bits per byte, lower is better, by length; trained on 64 bytes, three seeds, "
        "non-overlapping windows. [The study](../compare.md) has the other schemes and protocols; "
        "the numbers hold for its small model."
    )
    return "\n".join([intro, "", *table(heads, own)])


def tasks(name: str) -> str:
    """Its scores in each task that had it."""
    cells = []
    for title, body in re.findall(
        r"^### (\S+)\n(.*?)(?=^### |^## |\Z)", _text("tasks.md"), re.MULTILINE | re.DOTALL
    ):
        for heads, rows in tables_of(body):
            if "solved" not in heads:
                continue
            lengths = [n for n, head in enumerate(heads) if re.fullmatch(r"\d+ \(\d+x\)", head)]
            for row in (row for row in rows if row[0] == name):
                scores = "; ".join(f"{heads[n]}: {row[n].replace('*', '')}" for n in lengths)
                link = f"[{title}](../tasks.md#{re.sub(r'[^a-z0-9_-]', '', title.lower())})"
                cells.append((link, row[1].partition(" [")[0], scores))
    if not cells:
        return ""
    intro = "Scores by length, mean of three seeds. [Tasks](../tasks.md) says how they are made."
    return "\n".join([intro, "", *table(("task", "solved", "score at a length"), cells)])


def exactness(name: str) -> str:
    """Its worst errors."""
    summary = _text("exactness.md").partition("## Summary")[2].partition("\n## ")[0]
    (heads, rows), *_ = tables_of(summary)
    own = [row for row in rows if row[0] == name]
    if not own:
        return ""
    intro = (
        "The worst error up to position 2^24, over NumPy, PyTorch and JAX, eager and compiled, "
        "against 50 digits of mpmath. [Exactness](../exactness.md) has each of them."
    )
    return "\n".join([intro, "", *table(heads[1:], [row[1:] for row in own])])
