"""Regenerates docs/compare.md, and its table in the README: ``python docs/compare.py``.

It runs ``posenc compare`` with its defaults once per installed backend. Then it runs T5 alone at
the learning rate of the other weights. Each study gets a new folder; the machine should be idle.
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
from posenc.study.study import Study
from posenc.study.tables import table_markdown
from posenc.study.terminal import describe
from posenc.study.trainer import backends

HERE = Path(__file__).parent
HEAD = """# What `posenc compare` finds

`python docs/compare.py` makes this page: it runs the command with its defaults, once per backend,
in a new folder. The numbers hold for this configuration: {layers} layers, width {dim}, {heads}
heads, {steps} steps of {batch_size} x {train_len} bytes, and evaluation on {eval_windows} held-out
stretches of {longest} bytes.
"""

SLOW: dict[str, Any] = {"schemes": ("t5",), "position_lr_scale": 1.0}


def main() -> None:
    """Run the studies and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Study().steps, help="for a trial of this page")
    steps = parser.parse_args().steps
    parts = []
    for backend in [name for name, installed in backends().items() if installed]:
        with tempfile.TemporaryDirectory() as folder:
            parts.append(section(Study(backend=backend, out=folder, steps=steps)))
        with tempfile.TemporaryDirectory() as folder:
            parts.append(slow_t5(Study(**SLOW, backend=backend, out=folder, steps=steps)))
    shown = Study(steps=steps)
    head = HEAD.format(**{**vars(shown), "longest": shown.longest})
    page = "\n".join([head, *parts])
    (HERE / "compare.md").write_text(page, encoding="utf-8")
    readme = HERE.parent / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), page), encoding="utf-8")


def with_table(readme: str, page: str) -> str:
    """The README with the first table of the page between its marks."""
    begin, end = "<!-- first table of docs/compare.md -->\n", "\n<!-- end of table -->"
    table = page[page.index("| scheme") :].split("\n\n")[0]
    before, after = readme.split(begin)[0], readme.split(end)[1]
    return before + begin + table + end + after


def section(study: Study) -> str:
    """One backend: its tables, wall time and versions."""
    wall, records = run(study)
    summary = describe(study, study.corpus(), study.backend, wall)
    corpus, versions = summary["corpus"], summary["versions"] | records[0]["versions"]
    facts = [
        f"- wall time of the whole command: {wall:.0f} s for {len(records)} runs",
        f"- text: {corpus['name']}, {corpus['train_bytes']:,} bytes to train, "
        f"{corpus['validation_bytes']:,} held out, sha256 `{corpus['sha256'][:12]}`",
        f"- versions: {', '.join(f'{name} {value}' for name, value in versions.items())}",
    ]
    table = table_markdown(summary, records)
    return "\n".join([f"## With {study.backend}", "", *facts, "", table, ""])


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
    subprocess.run([sys.executable, "-m", "posenc", *words], check=True)
    wall = time.perf_counter() - begin
    lines = (Path(study.out) / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return wall, [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
