"""Regenerates docs/compare.md, its table in the README and its picture: ``python docs/compare.py``.

It runs ``posenc compare`` with its defaults once per installed backend. Then it runs T5 alone at
the learning rate of the other weights. A study gets a new folder; the machine should be idle.
``python docs/compare.py --picture`` only draws docs/compare.png, from the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from posenc.study.origin import command
from posenc.study.panels import (
    FONT,
    INK,
    MUTED,
    Line,
    draw,
    label_ends,
    label_room,
    limits_of,
    log_axis,
)
from posenc.study.picture import encode
from posenc.study.statistics import Interval
from posenc.study.study import Study
from posenc.study.tables import table_markdown
from posenc.study.terminal import describe
from posenc.study.trainer import backends

HERE = Path(__file__).parent
HEAD = """# What `posenc compare` finds

`python docs/compare.py` makes this page: it runs the command with its defaults, once per backend,
in a new folder. The numbers hold for this configuration: {layers} layers, width {dim}, {heads}
heads, {steps} steps of {batch_size} x {train_len} bytes, and evaluation on {eval_windows} held-out
stretches of {longest} bytes. [The atlas](atlas.md) has the other schemes.
"""
SLOW: dict[str, Any] = {"schemes": ("t5",), "position_lr_scale": 1.0}


def main() -> None:
    """Run the studies and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Study().steps, help="for a trial of this page")
    parser.add_argument("--picture", action="store_true", help="draw the page's tables, no study")
    options = parser.parse_args()
    path = HERE / "compare.md"
    if options.picture:
        draw_page(path.read_text(encoding="utf-8"), HERE / "compare.png")
        return
    page = default_sections(options.steps).rstrip() + "\n"
    readme = HERE.parent / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), page), encoding="utf-8")
    draw_page(page, HERE / "compare.png")
    path.write_text(page, encoding="utf-8")


def default_sections(steps: int) -> str:
    """The page: one section for each backend, and one more for T5."""
    parts = []
    for backend in [name for name, installed in backends().items() if installed]:
        with tempfile.TemporaryDirectory() as folder:
            parts.append(section(Study(backend=backend, out=folder, steps=steps)))
        with tempfile.TemporaryDirectory() as folder:
            parts.append(slow_t5(Study(**SLOW, backend=backend, out=folder, steps=steps)))
    shown = Study(steps=steps)
    head = HEAD.format(**{**vars(shown), "longest": shown.longest})
    return "\n".join([head, *parts])


def with_table(readme: str, page: str) -> str:
    """The README with the first table of the page between its marks."""
    begin, end = "<!-- first table of docs/compare.md -->\n", "\n<!-- end of table -->"
    table = page[page.index("| scheme") :].split("\n\n")[0]
    before, after = readme.split(begin)[0], readme.split(end)[1]
    return before + begin + table + end + after


def draw_page(page: str, path: Path) -> None:
    """The page's first two tables as one picture: one line per scheme."""
    from matplotlib.figure import Figure

    parts = page.split("\n\n")
    at = [n for n, part in enumerate(parts) if part.startswith("| scheme")][:2]
    panels = {parts[n - 1]: lines_of(parts[n]) for n in at}
    together = [line for lines in panels.values() for line in lines]
    figure = Figure(figsize=(10, 5), dpi=160)
    for n, (title, lines) in enumerate(panels.items()):
        axes = figure.add_axes((0.065 + 0.5 * n, 0.13, 0.43 - label_room(together) / 10, 0.74))
        draw(axes, lines, limits_of(together), marker=True)
        log_axis(axes, lines[0].x, [int(lines[0].x[0])])
        label_ends(axes, lines)
        axes.set_title(title.partition(":")[0], loc="left", fontsize=FONT, color=MUTED)
        axes.set_xlabel("evaluation length (bytes)", color=MUTED)
        axes.set_ylabel("bits per byte (lower is better)", color=MUTED)
    first, *_, last = together[0].x  # the first is the training length
    title = f"Trained on {first:g} bytes, tested on up to {last:g}"
    figure.text(0.015, 0.945, title, fontsize=13, color=INK)
    path.write_bytes(encode(figure, "png"))


def lines_of(table: str) -> list[Line]:
    """The rows of a table as lines; a scheme's second row, in a window, is dashed."""
    head, _, *rows = ([c.strip() for c in row.split("|")[1:-1]] for row in table.splitlines())
    lengths = [float(cell.split()[0]) for cell in head[1:]]
    schemes: list[str] = []
    lines: list[Line] = []
    for label, *cells in rows:
        scheme = label.partition(",")[0]
        if scheme == label:
            schemes.append(scheme)
        numbers = ([float(number) for number in cell.split(" ± ")] for cell in cells)
        intervals = [Interval(mean, half, Study().seeds) for mean, half in numbers]
        lines.append(Line(label, lengths, intervals, schemes.index(scheme), label != scheme))
    return lines


def section(study: Study) -> str:
    """One backend: its tables, wall time and versions."""
    wall, records = run(study)
    summary = describe(study, study.corpus(), study.backend, wall)
    table = table_markdown(summary, records)
    return "\n".join([f"## With {study.backend}", "", facts(summary, records), "", table, ""])


def facts(summary: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Wall time, text and versions of a study."""
    wall, corpus = summary["wall_seconds"], summary["corpus"]
    ran = next(record["versions"] for record in records if record["status"] == "ok")
    versions = (f"{name} {value}" for name, value in (summary["versions"] | ran).items())
    lines = [
        f"- wall time of the whole command: {wall:.0f} s for {len(records)} runs",
        f"- text: {corpus['name']}, {corpus['train_bytes']:,} bytes to train, "
        f"{corpus['validation_bytes']:,} held out, sha256 `{corpus['sha256'][:12]}`",
        f"- versions: {', '.join(versions)}",
    ]
    return "\n".join(lines)


def slow_t5(study: Study) -> str:
    """T5 with the same learning rate for its table as for other weights."""
    wall, records = run(study)
    summary = describe(study, study.corpus(), study.backend, wall)
    title = f"### T5 at the learning rate of the other weights, with {study.backend}"
    shown = command(replace(study, out=Study().out, backend="auto"))
    return "\n".join([title, "", f"`{shown}`", "", table_markdown(summary, records), ""])


def run(study: Study) -> tuple[float, list[dict[str, Any]]]:
    """Run a study by its command; return its seconds and its records."""
    words = shlex.split(command(study))[1:]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "posenc", *words], check=False)
    wall = time.perf_counter() - begin
    if done.returncode:
        sys.exit(done.returncode)
    about = json.loads((Path(study.out) / "study.json").read_text(encoding="utf-8"))
    lines = (Path(study.out) / "results.jsonl").read_text(encoding="utf-8").splitlines()
    # With runs that were kept from before, the command took less than the study.
    return max(wall, about["wall_seconds"]), [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
