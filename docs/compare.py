"""Regenerates docs/compare.md, its table in the README and its picture: ``python docs/compare.py``.

It runs ``posenc compare`` with its defaults once per installed backend. Then it runs T5 alone at
the learning rate of the other weights. ``python docs/compare.py --all`` makes the page's last
section instead: the whole catalogue, with one backend; ``--missing`` adds the schemes that have no
row there, or those that it names, as a table of its own. Each leaves the others' parts as they are.
A study gets a new folder, or ``--out``, where finished runs are kept; the machine should be idle.
``python docs/compare.py --picture`` only draws docs/compare.png, from the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import re
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
from posenc.study.tables import cost_table, table_markdown
from posenc.study.terminal import describe
from posenc.study.trainer import backends

HERE = Path(__file__).parent
HEAD = """# What `posenc compare` finds

`python docs/compare.py` makes this page: it runs the command with its defaults, once per backend,
in a new folder. The numbers hold for this configuration: {layers} layers, width {dim}, {heads}
heads, {steps} steps of {batch_size} x {train_len} bytes, and evaluation on {eval_windows} held-out
stretches of {longest} bytes.
"""
CATALOGUE = "## The whole catalogue"
LATER = "### Schemes that came later"
ABOUT = """`python docs/compare.py --all` makes this section, by this command:

```sh
{command}
```

`rope~rope_pi` is trained as `rope` and tested as `rope_pi`, without further training. Such rows
share one training per seed, and their factor is the longest length over the training length. With
the 4 frequencies of 8 channels, `p_rope` and `rope_clip_hann` both stop the last one and change no
other, so they are one scheme here. A scheme that failed is a row, with its reason below the tables.
"""

SLOW: dict[str, Any] = {"schemes": ("t5",), "position_lr_scale": 1.0}


def main() -> None:
    """Run the studies and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Study().steps, help="for a trial of this page")
    parser.add_argument("--all", action="store_true", help="the section of the whole catalogue")
    parser.add_argument(
        "--missing", nargs="*", metavar="SCHEME", help="these, or all without a row there"
    )
    parser.add_argument("--backend", default="jax", help="of these two (default: jax)")
    parser.add_argument("--out", help="folder of their study; default: a new one")
    parser.add_argument("--picture", action="store_true", help="draw the page's tables, no study")
    options = parser.parse_args()
    path = HERE / "compare.md"
    if options.picture:
        draw_page(path.read_text(encoding="utf-8"), HERE / "compare.png")
        return
    defaults, mark, catalogue = path.read_text(encoding="utf-8").partition(CATALOGUE)
    if options.all or options.missing is not None:
        before, _, _ = catalogue.partition(LATER)
        names: tuple[str, ...] = ("all",)
        if options.missing is not None:
            names = tuple(options.missing) or without_a_row(before)
        with tempfile.TemporaryDirectory() as folder:
            out = options.out or folder
            study = Study(schemes=names, steps=options.steps, backend=options.backend, out=out)
            if options.missing is not None:
                page = f"{defaults}{mark}{before.rstrip()}\n\n{later(study)}"
            else:
                page = f"{defaults.rstrip()}\n\n{whole_catalogue(study)}"
    else:
        page = "\n".join([default_sections(options.steps), mark + catalogue]).rstrip() + "\n"
        readme = HERE.parent / "README.md"
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), page), encoding="utf-8")
        draw_page(page, HERE / "compare.png")
    path.write_text(page, encoding="utf-8")


def default_sections(steps: int) -> str:
    """The page up to the section of the whole catalogue."""
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


def whole_catalogue(study: Study) -> str:
    """Every scheme of the catalogue: the tables, failures too, and the costs."""
    wall, records = run(study, accepted=(0, 1))  # 1: a scheme failed
    summary = describe(study, study.corpus(), study.backend, wall)
    about = ABOUT.format(command=command(replace(study, out=Study().out)))
    tables = [table_markdown(summary, records), cost_table(summary, records).markdown()]
    return "\n\n".join([CATALOGUE, about + "\n" + facts(summary, records), *tables]) + "\n"


def without_a_row(catalogue: str) -> tuple[str, ...]:
    """Labels that ``all`` stands for and that the section of the whole catalogue has no row of."""
    rows = set(re.findall(r"^\| (\S+) \|", catalogue, re.MULTILINE))
    return tuple(label for label in Study(schemes=("all",)).labels if label not in rows)


def later(study: Study) -> str:
    """Schemes that came after the table of the whole catalogue: their tables and costs."""
    wall, records = run(study, accepted=(0, 1))  # 1: a scheme failed
    summary = describe(study, study.corpus(), study.backend, wall)
    shown = command(replace(study, out=Study().out))
    about = f"`python docs/compare.py --missing` makes this table, here by `{shown}`:"
    tables = [table_markdown(summary, records), cost_table(summary, records).markdown()]
    return "\n\n".join([LATER, about, facts(summary, records), *tables]) + "\n"


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


def run(study: Study, accepted: tuple[int, ...] = (0,)) -> tuple[float, list[dict[str, Any]]]:
    """Run a study by its command; return its seconds and its records."""
    words = shlex.split(command(study))[1:]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "posenc", *words], check=False)
    wall = time.perf_counter() - begin
    if done.returncode not in accepted:
        sys.exit(done.returncode)
    about = json.loads((Path(study.out) / "study.json").read_text(encoding="utf-8"))
    lines = (Path(study.out) / "results.jsonl").read_text(encoding="utf-8").splitlines()
    # With runs that were kept from before, the command took less than the study.
    return max(wall, about["wall_seconds"]), [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
