"""What a sweep found: the summary in ``study.json``, a table, sentences and a CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from posenc.study.captions import tuned
from posenc.study.run import Run
from posenc.study.statistics import Summary
from posenc.study.sweeps import SEED, Record, Tuning, by_combination, choose, edges, mean_loss
from posenc.study.table import Table

NEAR = 2.0  # a factor: how far from the choice the loss must stay low for it to be flat
_CAPTION = (
    "Tuned: the value with the lowest loss, in {units}, at the training length after {runs} for "
    "each combination of values, on held-out text or examples that no result scores. Rise: by how "
    "much the loss is higher at the values next to the choice, half to twice it."
)


def tuning_summary(
    trials: Sequence[tuple[Tuning, Sequence[Run]]], records: Iterable[Record]
) -> dict[str, Any]:
    """All that was tried and chosen, for ``study.json`` and for everything that shows it."""
    by_run = {record["run"]: record for record in records}
    return {
        "seeds": sorted({run.seed for _, runs in trials for run in runs}),
        "schemes": [
            {
                **_about(one, [by_run[r.digest()] for r in runs]),
                "unit": runs[0].of_task.unit,
            }
            for one, runs in trials
        ],
    }


def _about(tuning: Tuning, records: Sequence[Record]) -> dict[str, Any]:
    chosen = choose(tuning, records)
    return {
        "task": tuning.key,
        "scheme": tuning.trained,
        "labels": tuning.labels,
        "grid": dict(tuning.grid),
        "setting": dict(tuning.setting),
        "chosen": chosen,
        "edges": edges(tuning, chosen),
        "trials": [
            {
                "values": values,
                "loss": mean_loss(own),
                "seeds": [
                    {
                        "seed": seed,
                        "loss": record.get("validation", {}).get("loss"),
                        "status": record["status"],
                        "error": record.get("error"),
                    }
                    for seed, record in enumerate(own, SEED)
                ],
            }
            for values, own in by_combination(tuning, records)
        ],
    }


def every(summary: Summary) -> Sequence[Mapping[str, Any]]:
    """What the summary says of each tuned scheme; empty without a sweep."""
    found: Sequence[Mapping[str, Any]] = summary.get("tuning", {}).get("schemes", ())
    return found


def along(one: Mapping[str, Any], option: str) -> dict[float, float | None]:
    """The loss at each value of an option, with the best values of the others; None: diverged."""
    found: dict[float, float | None] = {}
    for trial in one["trials"]:
        value, loss = trial["values"][option], trial["loss"]
        before = found.setdefault(value, loss)
        if loss is not None and (before is None or loss < before):
            found[value] = loss
    return found


def rise(one: Mapping[str, Any], option: str) -> str:
    """By how much the loss is higher at the other values within a factor ``NEAR`` of the choice."""
    at = one["chosen"].get(option)
    if not at:
        return "–"
    others = {name: value for name, value in one["chosen"].items() if name != option}
    best = along(one, option)[at] or 0.0
    near = {
        trial["values"][option]: trial["loss"]
        for trial in one["trials"]
        if others.items() <= trial["values"].items()
        and at / NEAR <= trial["values"][option] * (1 + 1e-9)
        and trial["values"][option] <= at * NEAR * (1 + 1e-9)
    }
    shown = [
        "diverges" if loss is None else f"{loss - best:.3f}"
        for value, loss in sorted(near.items())
        if value != at
    ]
    return ", ".join(shown) or "–"


def tuning_table(summary: Summary) -> Table | None:
    """One row for each tuned scheme and option; None without a sweep."""
    rows = []
    for name, one in _named(summary):
        best = min((t["loss"] for t in one["trials"] if t["loss"] is not None), default=None)
        for option, values in one["grid"].items():
            chosen = one["chosen"].get(option)
            lost = [v for v, loss in along(one, option).items() if loss is None]
            notes = ["at the edge"] * (option in one["edges"])
            notes += [f"no loss at {_listed(lost)}"] if lost and chosen is not None else []
            if chosen is None:
                notes = [f"no value trained; runs have {one['setting'][option]:g}"]
            shown = "–" if chosen is None else f"{chosen:g}"
            loss = "–" if best is None else f"{best:.3f}"
            tried = f"{len(values)}, {min(values):g} to {max(values):g}"
            cells = (name, option, shown, tried, loss, rise(one, option))
            rows.append((*cells, "; ".join(notes)))
    columns = ["scheme", "option", "chosen", "tried", "loss", "rise", "note"]
    units = " or ".join(dict.fromkeys(one["unit"] for one in every(summary)))
    if not rows:
        return None
    seeds = summary["tuning"]["seeds"]
    runs = f"one run of seed {seeds[0]}"
    if len(seeds) > 1:
        runs = f"{len(seeds)} runs, the mean of seeds {seeds[0]} to {seeds[-1]},"
    return Table(_CAPTION.format(units=units, runs=runs), columns, rows)


def _named(summary: Summary) -> list[tuple[str, Mapping[str, Any]]]:
    """Each tuned scheme, with its task if there are several."""
    several = len({one["task"] for one in every(summary)}) > 1
    return [
        (f"{one['task']}: {one['scheme']}" if several else one["scheme"], one)
        for one in every(summary)
    ]


def tuning_sentences(summary: Summary) -> list[str]:
    """Choices at the edge of a grid, and schemes that an option does not touch."""
    lines = []
    schemes = every(summary)
    at_edge = [
        f"{name} ({option} {one['chosen'][option]:g})"
        for name, one in _named(summary)
        for option in one["edges"]
    ]
    if at_edge:
        lines.append(
            "At the edge of the grid, so that a wider grid may give a lower loss: "
            f"{', '.join(at_edge)}."
        )
    labels = dict.fromkeys(summary["config"]["schemes"])
    for option in tuned(summary):
        own = {label for one in schemes if option in one["grid"] for label in one["labels"]}
        others = [label for label in labels if label not in own]
        if others:
            lines.append(
                f"{option} changes nothing for {', '.join(others)}, so it was not tried there."
            )
    none = [name for name, one in _named(summary) if not one["chosen"]]
    if none:
        lines.append(f"No value of the grid trained, so the setting is kept: {', '.join(none)}.")
    return lines


def tuning_csv(summary: Summary) -> str:
    """Tidy rows: one per tried run."""
    file = io.StringIO()
    columns = ["task", "scheme", *tuned(summary), "seed", "loss", "loss_unit"]
    columns += ["chosen", "status", "error"]
    writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(_rows(summary))
    return file.getvalue()


def _rows(summary: Summary) -> Iterator[dict[str, Any]]:
    for one in every(summary):
        for trial in one["trials"]:
            for run in trial["seeds"]:
                yield {
                    "task": one["task"],
                    "scheme": one["scheme"],
                    **trial["values"],
                    **run,
                    "loss_unit": one["unit"],
                    "chosen": trial["values"] == one["chosen"],
                }


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
