"""Tables and sentences about the tasks of a study, and its tidy CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from posenc.study.captions import length_label, tuned_caption
from posenc.study.effective import NOLIMA
from posenc.study.outcomes import (
    ABOVE_CHANCE,
    Outcome,
    best,
    finetuned_only,
    of_task,
    outcomes,
    score_name,
    tasks,
    top_schemes,
    wilson,
)
from posenc.study.results import ABOUT, stages
from posenc.study.results import about as describe
from posenc.study.statistics import Records, Summary, mean_interval
from posenc.study.table import Table

COLUMNS = (
    "task",
    "kind",
    "test",  # empty: as in training
    "scheme",
    "seed",
    "train_len",
    "length",
    "examples",
    "token_accuracy",
    "exact_match",
    "loss",
    "loss_unit",
    "solved",  # the step at which training solved the task; empty: it did not
    "steps",
    "status",
)
_MOST_TASKS = 6  # columns of a table
_HOLDS = (
    "RULER, NoLiMa: the length to which the score holds, with the interval over seeds and "
    "sequences; – where the score at the training length is less than "
    f"{ABOVE_CHANCE} above chance."
)
_HOLDS_LOSS = (
    f"NoLiMa: the length to which the loss is at most that at the training length divided by "
    f"{NOLIMA}, with the interval over seeds and sequences."
)


def task_tables(summary: Summary, records: Records) -> list[Table]:
    """All tables of tasks: that of tasks by schemes if there are several, then one per task."""
    about = tasks(summary)
    each = [task_table(label, one, records) for label, one in about.items()]
    tables = [*(overview(summary, records) if len(about) > 1 else ()), *each]
    said = tuned_caption(summary)
    return [replace(one, caption=f"{one.caption} {said}") for one in tables] if said else tables


def overview(summary: Summary, records: Records) -> Iterator[Table]:
    """Schemes by tasks: the score at each task's longest length, and how many seeds solved it."""
    every = list(tasks(summary).items())
    for start in range(0, len(every), _MOST_TASKS):
        part = every[start : start + _MOST_TASKS]
        found = {label: finetuned_only(outcomes(about, records)) for label, about in part}
        schemes = list(summary["config"]["schemes"])
        rows, wrong, top = [], set(), set()
        for row, scheme in enumerate(schemes):
            cells = []
            for column, (label, about) in enumerate(part, 1):
                one = next((o for o in found[label] if o.scheme == scheme), None)
                cells.append(_short(one, about["eval_lens"][-1]))
                if one is not None and one.leaks:
                    wrong.add((row, column))
                if scheme in top_schemes(found[label], about["eval_lens"][-1]):
                    top.add((row, column))
            rows.append((scheme, *cells))
        heads = [f"{label} ({a['kind']}), {_times(a)}{_of_loss(a)}" for label, a in part]
        caption = (
            "Score at the longest length, and how many seeds solved the task in training. Where "
            "some did and some did not, the score is that of those that did."
        )
        yield Table(
            caption, ["scheme", *heads], rows, best=frozenset(top - wrong), wrong=frozenset(wrong)
        )


def task_table(label: str, about: Mapping[str, Any], records: Records) -> Table:
    """One task: the score at each length, of each test, and both effective lengths."""
    found = outcomes(about, records)
    lengths = about["eval_lens"]
    loss = about["score"] == "loss"
    rows: list[Sequence[str]] = []
    minor, top, wrong = set(), set(), set()
    for one in found:
        for test in about["tests"]:
            if test or one.before_finetuning:
                minor.add(len(rows))
            name = f"{one.label}, {test}" if test else one.label
            cells = [mean_interval(one.scores(n, test)).text() for n in lengths]
            facts = ["", *[""] * (1 if loss else 2)]
            if not test:
                holds = [one.effective(own) for own in ((True,) if loss else (False, True))]
                facts = [
                    "" if one.before_finetuning else _solved(one),
                    *(h.text() if h else "–" for h in holds),
                ]
                for column, length in enumerate(lengths, 2):
                    if not one.before_finetuning and one.scheme in top_schemes(
                        finetuned_only(found), length
                    ):
                        top.add((len(rows), column))
                    if one.leaks and length > about["train_len"]:
                        wrong.add((len(rows), column))
            rows.append((name, facts[0], *cells, *facts[1:]))
    heads = [length_label(length, about["train_len"]) for length in lengths]
    caption = (
        f"{label} ({about['kind']}): {score_name(about)}; "
        + ("" if loss else f"chance is {about['chance']:.2g}. ")
        + "Solved: seeds that solved it in training, with Wilson's interval. "
        + (_HOLDS_LOSS if loss else _HOLDS)
    )
    columns = ["scheme", "solved", *heads, *([] if loss else ["RULER"]), "NoLiMa"]
    return Table(caption, columns, rows, frozenset(minor), frozenset(top - wrong), frozenset(wrong))


def sentences(summary: Summary, records: Records) -> list[str]:
    """One sentence per task: which scheme is best, where its seeds are apart from all others'."""
    return [
        _sentence(label, about, finetuned_only(outcomes(about, records)))
        for label, about in tasks(summary).items()
    ]


def _sentence(label: str, about: Mapping[str, Any], found: Sequence[Outcome]) -> str:
    leaking = [one.scheme for one in found if one.leaks]
    if leaking:
        return (
            f"{label}: {', '.join(leaking)} passes a task that it must fail, so the harness leaks "
            "the answer."
        )
    if about["kind"] == "must fail":
        return f"{label}: no scheme passes beyond the training length, as theory says."
    longest = about["eval_lens"][-1]
    names = best(found, longest)
    if not names:
        return f"{label}: no run has finished."
    first = next(one for one in found if one.scheme == names[0])
    score = f"{first.score(longest):.3f}{_of_loss(about)} at "
    score += length_label(longest, about["train_len"])
    most = "has the lowest loss" if first.lower else "scores most"
    if not any(one.solved for one in found):
        steps = about["recipe"]["steps"]
        return f"{label}: no run solved it in {steps} steps; {names[0]} {most}, {score}."
    holds = first.effective(own=True)
    held = f"; it holds to {holds.text()} (NoLiMa)" if holds else ""
    if len(names) == 1 and len(first.scores(longest)) > 1:
        apart = "below" if first.lower else "above"
        return f"{label}: {names[0]} is best, {score}, {apart} every seed of the others{held}."
    if len(first.scores(longest)) == 1:
        return f"{label}: {names[0]} {most}, {score}, but one seed is no verdict{held}."
    others = _others(names[1:])
    return f"{label}: {names[0]} {most}, {score}; its seeds overlap those of {others}{held}."


def _of_loss(about: Mapping[str, Any]) -> str:
    """The unit of the score, where it is a loss."""
    return f" {about['unit']}" if about["score"] == "loss" else ""


def _others(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")


def notes(summary: Summary, records: Records) -> list[str]:
    """Which seeds failed to run, and how many tasks each seed count can tell apart."""
    seeds = {record["seed"] for record in records}
    if not tasks(summary) or len(seeds) >= 5:
        return []
    low, high = wilson(len(seeds), len(seeds))
    few = "1 seed decides" if len(seeds) == 1 else f"{len(seeds)} seeds decide"
    return [
        f"{few} little: if all solve a task, the interval of the share that does is "
        f"{low:.0%} to {high:.0%}; with 10 it is "
        f"{wilson(10, 10)[0]:.0%} to 100%. Set by --seeds."
    ]


def tasks_csv(summary: Summary, records: Records) -> str:
    """Tidy rows: one per task, test, scheme, seed and length; and one per group of answers."""
    named = dict.fromkeys(a["groups"] for a in tasks(summary).values() if a["groups"])
    tuned = ("finetune_steps",) if any("before" in record for record in records) else ()
    file = io.StringIO()
    names = [*COLUMNS, *tuned, *named, *ABOUT]
    writer = csv.DictWriter(file, names, lineterminator="\n", restval="")
    writer.writeheader()
    for label, about in tasks(summary).items():
        for record in of_task(records, about):
            for stage, steps in stages(record):
                rows = _rows(label, about, stage)
                writer.writerows({**row, **dict.fromkeys(tuned, steps)} for row in rows)
    return file.getvalue()


def _rows(label: str, about: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[Any]:
    common = {"task": label, "kind": about["kind"], **describe(record)}
    common |= {name: record.get(name) for name in ("scheme", "seed", "train_len", "status")}
    if record["status"] != "ok":
        yield common
        return
    common |= {"solved": record["solved"], "steps": record["steps"]}
    for test, by_length in record["scores"].items():
        for length, cell in by_length.items():
            row = {**common, "test": test, "length": int(length)}
            names = ("examples", "token_accuracy", "exact_match", "loss")
            yield row | {name: cell[name] for name in names} | {"loss_unit": about["unit"]}
            pairs = zip(about["group_names"], cell.get("groups", ()), strict=False)
            for group, (right, asked) in pairs:
                if asked:
                    yield row | {about["groups"]: group, "token_accuracy": right / asked}


def _solved(one: Outcome) -> str:
    n = len(one.records)
    low, high = wilson(one.solved, n)
    failed = f", {one.failed} failed" if one.failed else ""
    return f"{one.solved} of {n} [{low:.2f}, {high:.2f}]{failed}" if n else f"{one.failed} failed"


def _short(one: Outcome | None, length: int) -> str:
    if one is None or not one.records:
        return "–" if one is None else "failed"
    score = one.score(length)
    shown = "–" if score != score else f"{score:.3f}"
    return f"{shown} ({one.solved}/{len(one.records)})"


def _times(about: Mapping[str, Any]) -> str:
    return f"{about['eval_lens'][-1] / about['train_len']:g}x"
