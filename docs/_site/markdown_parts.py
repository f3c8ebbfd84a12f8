"""Parts of pages in Markdown: tables, papers, code, and files written only if they changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def put(path: Path, text: str) -> None:
    """Write a file unless it has that text already, so that Sphinx reads only what changed."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def code(text: str) -> str:
    """RST's literals as Markdown's, on one line."""
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


def bullets(items: Iterable[str]) -> str:
    """A list of points."""
    return "\n".join(f"- {item}" for item in items)


def paper_link(text: str) -> str:
    """A citation whose arXiv number is a link."""
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def short_paper(text: str) -> str:
    """Authors and year, which are the link."""
    return re.sub(r"(.*), arXiv (\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\2)", text)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown; numbers stand at the right."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    number = re.compile(r"\*{0,2}[<≥\-–]?\s?[\d.]+( ± [\d.]+)?\*{0,2}|")
    right = [
        bool(rows) and all(number.fullmatch(row[n]) for row in rows) and any(r[n] for r in rows)
        for n in range(len(heads))
    ]
    line = [" --: " if r else " :-- " for r in right]
    return [
        f"| {' | '.join(heads)} |",
        f"|{'|'.join(line)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
