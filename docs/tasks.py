"""Puts results into docs/tasks.md: ``python docs/tasks.py FOLDER...``.

Each folder is the ``--out`` of a finished ``posenc compare --task ...``. The tables of its tasks
replace those of the page, and its rows those of docs/tasks.csv; other tasks stay as they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from posenc.study.outcomes import of_task, tasks
from posenc.study.recipe import Recipe
from posenc.study.task_tables import COLUMNS, task_table, tasks_csv
from posenc.study.tasks.catalogue import TEXT, task_classes

HERE = Path(__file__).parent
GROUPS = ("depth", "links")
_MARK = "<!-- results of {} -->"
_END = "<!-- end of results -->"


def main() -> None:
    """Write the page and the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="*", type=Path)
    page, rows = HERE / "tasks.md", HERE / "tasks.csv"
    text = page.read_text()
    kept = list(csv.DictReader(rows.open())) if rows.exists() else []
    for folder in parser.parse_args().folder:
        summary: dict[str, Any] = json.loads((folder / "study.json").read_text())
        lines = (folder / "results.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        for label, about in tasks(summary).items():
            text = replaced(text, label, section(label, about, summary, records))
            of_others = [row for row in kept if row["task"] != label]
            one = {**summary, "tasks": {label: about}}
            kept = [*of_others, *csv.DictReader(io.StringIO(tasks_csv(one, records)))]
    page.write_text(between(text, "<!-- settings -->", "<!-- end of settings -->", settings()))
    with rows.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *GROUPS], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(kept, key=lambda row: row["task"]))


def section(label: str, about: Any, summary: Any, records: Any) -> str:
    """The table of a task, and how it came about."""
    own = of_task(records, about)
    ok = [record for record in own if record["status"] == "ok"]
    seconds = sum(record["seconds"] for record in ok) / max(1, len(ok))
    versions = {**summary["versions"], **ok[0]["versions"]}
    named = ", ".join(
        f"{name} {versions[name]}"
        for name in ("posenc", "numpy", "jax", "torch")
        if name in versions
    )
    schemes = " ".join(dict.fromkeys(record["scheme"] for record in own))
    table = task_table(label, about, records).markdown().partition("\n\n")[2]
    return (
        f"`posenc compare --task {label} --schemes {schemes}`: {len(own)} runs of {seconds:.0f} s "
        f"on average, two at once; {named}.\n\n{table}"
    )


def settings() -> str:
    """The default settings of all tasks, as a table."""
    lines = [
        "| task | size in training | tested at | tokens | steps | rate | batch | solved at |",
        "| :-- | --: | :-- | --: | --: | --: | --: | :-- |",
    ]
    for name in task_classes():
        recipe = Recipe(task=name)
        task = recipe.of_task
        sizes = f"{task.least_size} to {recipe.train_len}" if task.varied else recipe.train_len
        lengths = ", ".join(map(str, recipe.eval_lens))
        by = task.solved_by.replace("_", " ")
        solved = "never" if name == TEXT else f"{by} {task.solved_at:g}"
        lines.append(
            f"| {name} | {sizes} | {lengths} | {recipe.train_tokens} | {recipe.steps} | "
            f"{recipe.learning_rate:g} | {recipe.batch_size} | {solved} |"
        )
    return "\n".join(lines)


def between(text: str, start: str, end: str, new: str) -> str:
    """The text with what stands between two marks replaced."""
    before, _, rest = text.partition(start)
    return f"{before}{start}\n{new}\n{end}{rest.partition(end)[2]}"


def replaced(text: str, label: str, new: str) -> str:
    """The page with the results of one task replaced."""
    start = re.escape(_MARK.format(label))
    pattern = re.compile(f"({start}\n).*?({re.escape(_END)})", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"docs/tasks.md has no place for the results of {label!r}: {start}")
    return pattern.sub(lambda match: f"{match[1]}\n{new}\n\n{match[2]}", text)


if __name__ == "__main__":
    main()
