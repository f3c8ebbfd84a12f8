"""The page and the picture of the atlas, from its records."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from markdown_parts import table
from matplotlib.figure import Figure

from posenc.study.captions import failures, length_label
from posenc.study.outcomes import Outcome, outcomes
from posenc.study.picture import encode
from posenc.study.recipe import Recipe
from posenc.study.specs import sides
from posenc.study.statistics import Records, mean_interval
from posenc.study.study import Study
from posenc.study.tables import holds_table, loss_tables
from posenc.study.tasks.catalogue import TEXT, expand
from posenc.study.terminal import describe

_AUTO = {"torch": "PyTorch", "jax": "JAX"}
SEEDS = 3  # of each scheme, at least
_INK, _PALE = "#1a1a1a", "#ffffff"


def tasks() -> list[str]:
    """Labels of all tasks, text first."""
    every = expand(["all"])
    return [TEXT, *(task for task in every if task != TEXT)]


@dataclass(frozen=True)
class Column:
    """One task: its records and, by scheme, what they say."""

    task: str
    records: Records

    @property
    def schemes(self) -> list[str]:
        """The labels that have a record."""
        return list(dict.fromkeys(record["scheme"] for record in self.records))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What a report of these records would say of its study."""
        study = Study(task=(self.task,), schemes=tuple(self.schemes), backend="jax")
        return describe(study, None, "jax", 0.0)

    @property
    def about(self) -> Mapping[str, Any]:
        """What it says of the task."""
        return dict(self.summary["tasks"][self.task])

    @cached_property
    def outcomes(self) -> dict[str, Outcome]:
        """By scheme, of a task with answers."""
        return {one.scheme: one for one in outcomes(self.about, self.records)}

    @cached_property
    def losses(self) -> dict[str, dict[int, float]]:
        """By scheme, of text: the mean at each length."""
        found: dict[str, dict[int, float]] = {}
        for scheme in self.schemes:
            ok = [r for r in self.records if r["scheme"] == scheme and r["status"] == "ok"]
            if ok:
                lengths = ok[0]["loss"]
                found[scheme] = {int(n): mean(r["loss"][n] for r in ok) for n in lengths}
        return found

    @cached_property
    def holds(self) -> dict[str, str]:
        """By scheme: the length to which its score or loss holds, NoLiMa's definition."""
        if self.task == TEXT:
            found = holds_table(self.summary, self.records)
            return {row[0]: row[2] for row in found.rows} if found else {}
        each = {name: one.effective(True) for name, one in self.outcomes.items() if one.records}
        return {name: one.text() if one else "–" for name, one in each.items()}

    @property
    def lengths(self) -> tuple[int, int]:
        """The length of training, and the longest of evaluation."""
        recipe = Recipe(task=self.task)
        return recipe.train_len, recipe.longest

    def shown(self, scheme: str, length: int) -> str:
        """The score at a length."""
        if self.task == TEXT:
            return f"{self.losses[scheme][length]:.2f}"
        return f"{self.outcomes[scheme].score(length):.2f}".removeprefix("0")

    def share(self, scheme: str, length: int) -> float:
        """How much of what can be reached is reached at a length, 0 to 1. NaN without records.

        A score above chance, over the best above chance; for a loss, the lowest of all schemes at
        the training length over it.
        """
        if self.task == TEXT:
            if not (losses := self.losses.get(scheme)):
                return math.nan
            best = min(each[self.lengths[0]] for each in self.losses.values())
            return min(1.0, best / losses[length])
        one = self.outcomes.get(scheme)
        if one is None or not one.records:
            return math.nan
        chance = self.about["chance"]
        return max(0.0, (one.score(length) - chance) / (1 - chance))


def columns_of(stored: Mapping[str, Records]) -> tuple[list[Column], list[Column]]:
    """The tasks that the page shows, and those that are begun: most schemes lack seeds."""
    names, shown, begun = Study(schemes=("all",)).labels, [], []
    for task, records in stored.items():
        seeds = Counter(record["scheme"] for record in records if record["status"] == "ok")
        most = 2 * sum(seeds[name] >= SEEDS for name in names) > len(names)
        (shown if most else begun).append(Column(task, records))
    return shown, begun


def write(docs: Path, stored: Mapping[str, Records]) -> None:
    """Replace what lies between the marks of atlas.md, and draw atlas.png."""
    columns, begun = columns_of(stored)
    path = docs / "atlas.md"
    costs = json.loads((docs / "costs.json").read_text(encoding="utf-8"))
    text = path.read_text(encoding="utf-8")
    for name, block in blocks(columns, begun, costs).items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}{block}\n{end}{rest.partition(end)[2]}"
    path.write_text(text, encoding="utf-8")
    (docs / "atlas.png").write_bytes(encode(picture(columns), "png"))


def blocks(
    columns: Sequence[Column], begun: Sequence[Column], costs: Mapping[str, Any]
) -> dict[str, str]:
    """The parts of the page by the names of their marks."""
    return {
        "facts": facts(columns),
        "holds": holds(columns),
        "losses": losses(columns),
        "scores": scores(columns),
        "costs": costs_table(order(columns), costs),
        "missing": missing(columns, begun),
    }


def order(columns: Sequence[Column]) -> list[str]:
    """Schemes by the mean of their shares at the longest lengths, the best first."""
    schemes = dict.fromkeys(name for column in columns for name in column.schemes)

    def average(scheme: str) -> float:
        each = (column.share(scheme, column.lengths[1]) for column in columns)
        found = [share for share in each if not math.isnan(share)]
        return -mean(found) if found else math.inf

    return sorted(schemes, key=lambda scheme: (average(scheme), scheme))


def facts(columns: Sequence[Column]) -> str:
    """How each task's records came about."""
    rows = []
    for column in columns:
        ok = [record for record in column.records if record["status"] == "ok"]
        schemes = {record["scheme"] for record in ok}
        each = [sum(r["scheme"] == name for r in ok) for name in schemes]
        seeds = str(min(each)) if min(each) == max(each) else f"{min(each)} to {max(each)}"
        hours = sum(record["seconds"] for record in ok) / 3600
        ran = sorted({_versions(record) for record in ok})
        failed = str(len(column.records) - len(ok))
        rows.append((column.task, str(len(schemes)), seeds, failed, f"{hours:.1f}", "; ".join(ran)))
    heads = ("task", "schemes", "seeds", "failed", "hours of one core", "versions and processor")
    return "\n".join(table(heads, rows))


def _versions(record: Mapping[str, Any]) -> str:
    versions = record["versions"]
    return f"posenc {record['posenc']}, jax {versions['jax']}, {versions.get('processor', '')}"


def holds(columns: Sequence[Column]) -> str:
    """Schemes by tasks: to which length."""
    heads = ["scheme", *(f"{c.task} ({c.lengths[0]})" for c in columns)]
    rows = [(name, *(c.holds.get(name, "") for c in columns)) for name in order(columns)]
    return "\n".join(table(heads, rows))


def losses(columns: Sequence[Column]) -> str:
    """The losses of text, by both protocols, and what failed there."""
    of_text = [column for column in columns if column.task == TEXT]
    parts = []
    for column in of_text:
        for one in loss_tables(column.summary, column.records)[:2]:
            parts.append(one.markdown())
        parts += failures(column.records)
    return "\n\n".join(parts)


def scores(columns: Sequence[Column]) -> str:
    """One table for each task: seeds that solved it, and the score at each length."""
    parts = []
    for column in columns:
        if column.task == TEXT:
            continue
        about = column.about
        heads = [
            "scheme", "solved", *(length_label(n, about["train_len"]) for n in about["eval_lens"]),
        ]  # fmt: skip
        rows = [
            (name, f"{one.solved} of {len(one.records)}",
             *(mean_interval(one.scores(n)).text() for n in about["eval_lens"]))
            for name, one in column.outcomes.items()
        ]  # fmt: skip
        title = f"### {column.task}\n\n{about['title']} Score: {about['score'].replace('_', ' ')}."
        parts += [title, "\n".join(table(heads, rows)), *failures(column.records)]
    return "\n\n".join(parts)


def costs_table(names: Sequence[str], costs: Mapping[str, Any]) -> str:
    """What the implementation costs that ``auto`` takes, over attention without positions."""
    rows = []
    for label in names:
        found = costs.get(sides(label)[1], {})
        cells = [_auto(found.get(framework, {})) for framework in _AUTO]
        rows.append((label, *(cell for pair in cells for cell in pair)))
    heads = [
        "scheme",
        *(f"{name}, {what}" for name in _AUTO.values() for what in ("forward", "step")),
    ]
    return "\n".join(table(heads, rows))


def _auto(implementations: Mapping[str, Any]) -> tuple[str, str]:
    chosen = [each for each in implementations.values() if each.get("auto")]
    chosen = chosen or [each for each in implementations.values() if "forward" in each]
    if not chosen:
        return "–", "–"
    return str(chosen[0].get("forward", "–")), str(chosen[0].get("step", "–"))


def missing(columns: Sequence[Column], begun: Sequence[Column]) -> str:
    """Tasks without records, tasks that are begun, and schemes of the catalogue without some."""
    names, stored = Study(schemes=("all",)).labels, {c.task: c for c in (*columns, *begun)}
    rows = []
    for task in tasks():
        own = stored.get(task)
        lacking = [name for name in names if own is None or name not in own.schemes]
        if own in begun:
            rows.append((task, f"begun: {len(own.records)} of {SEEDS * len(names)} records"))
        elif lacking:
            every = len(lacking) == len(names)
            rows.append((task, f"all {len(names)}" if every else ", ".join(lacking)))
    if not rows:
        return "Every task of the catalogue has records of every scheme."
    return "\n".join(table(("task", "schemes without records"), rows))


def picture(columns: Sequence[Column]) -> Figure:
    """The matrix of schemes and tasks: the score at the length of training and at the longest."""
    names = order(columns)
    places = [(column, length) for column in columns for length in column.lengths]
    values = np.array([[column.share(name, n) for column, n in places] for name in names])
    figure = Figure(figsize=(2.2 + 0.7 * len(places), 1.4 + 0.21 * len(names)), dpi=130)
    axes = figure.subplots()
    axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1)
    for row, name in enumerate(names):
        for place, (column, length) in enumerate(places):
            share = values[row, place]
            text = "–" if math.isnan(share) else column.shown(name, length)
            colour = _INK if math.isnan(share) or share > 0.55 else _PALE
            axes.text(place, row, text, ha="center", va="center", fontsize=8, color=colour)
    # A name of several words takes as many lines: columns are narrow.
    names_of = [column.task.replace("_", "_\n") for column, _ in places]
    ends = [n // column.lengths[0] for column, n in places]
    heads = [f"{name}\n{end}x" for name, end in zip(names_of, ends, strict=True)]
    axes.set_xticks(range(len(places)), heads, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    figure.tight_layout()
    return figure
