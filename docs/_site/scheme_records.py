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


def _of_atlas(part: str) -> str:
    """What stands between two marks of the page of the atlas."""
    return (
        _text("atlas.md").partition(f"<!-- {part} -->")[2].partition(f"<!-- end of {part} -->")[0]
    )


def study(name: str) -> str:
    """Its rows in the atlas's table of text, of non-overlapping windows."""
    tables = list(tables_of(_of_atlas("losses")))
    heads, rows = tables[0] if tables else ([], [])
    own = [row for row in rows if _is_of(row[0], name)]
    if not own:
        return "No row in the [atlas](../atlas.md) yet: `python docs/atlas.py --task text` adds it."
    intro = (
        "Bits per byte, lower is better, by length; trained on 64 bytes, non-overlapping windows. "
        "[The atlas](../atlas.md) has the other schemes and protocols; the numbers hold for its "
        "small model."
    )
    return "\n".join([intro, "", *table(heads, own)])


def tasks(name: str) -> str:
    """Its scores in each task that had it, and in the atlas, in those that had not."""
    cells: dict[str, tuple[str, str, str]] = {}
    for page in ("tasks.md", "atlas.md"):
        for title, heads, row in _of_tasks(page, name):
            lengths = [n for n, head in enumerate(heads) if re.fullmatch(r"\d+ \(\d+x\)", head)]
            scores = "; ".join(f"{heads[n]}: {row[n].replace('*', '')}" for n in lengths)
            link = f"[{title}](../{page}#{re.sub(r'[^a-z0-9_-]', '', title.lower())})"
            cells.setdefault(title, (link, row[1].partition(" [")[0], scores))
    if not cells:
        return ""
    intro = (
        "Scores by length, mean over seeds. [Tasks](../tasks.md) says how they are made; "
        "[the atlas](../atlas.md) has the whole catalogue."
    )
    return "\n".join([intro, "", *table(("task", "solved", "score at a length"), cells.values())])


def _of_tasks(page: str, name: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Its rows in the tables of tasks of a page: title, heads and cells."""
    sections = r"^### (\S+)\n(.*?)(?=^### |^## |\Z)"
    for title, body in re.findall(sections, _text(page), re.MULTILINE | re.DOTALL):
        for heads, rows in tables_of(body):
            if "solved" in heads:
                yield from ((title, heads, row) for row in rows if row[0] == name)


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
