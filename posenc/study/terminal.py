"""What ``posenc compare`` does: it runs a study, then writes tables, figures and the report."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from posenc.study.comparisons import comparisons_csv
from posenc.study.corpus import Corpus, printable
from posenc.study.estimate import estimate
from posenc.study.identity import posenc_digest
from posenc.study.live import LiveLine
from posenc.study.origin import command, commit, cores, processor
from posenc.study.outcomes import has_text, outcomes, tasks, text_records
from posenc.study.outputs import check_folder, holds_results, publish, task_file
from posenc.study.picture import FORMATS
from posenc.study.plots import loss_against_length
from posenc.study.progress import Progress, width
from posenc.study.recipe import Recipe
from posenc.study.report import study_markdown, study_text, write_report
from posenc.study.results import Record, seconds, write_tables, write_whole
from posenc.study.run import Run
from posenc.study.runner import (
    Log,
    compute,
    jobs,
    plan,
    plan_tuning,
    weights_folder,
    without_weights,
)
from posenc.study.specs import fitted_settings
from posenc.study.statistics import Records, Summary
from posenc.study.stopping import exit_status
from posenc.study.study import Study
from posenc.study.sweep_plots import tuning_picture
from posenc.study.sweep_tables import tuning_csv, tuning_summary
from posenc.study.sweeps import SEED
from posenc.study.task_plots import task_picture
from posenc.study.task_tables import tasks_csv
from posenc.study.trackers import Tracker, Trackers, make_trackers
from posenc.study.trainer import choose_backend


def compare(study: Study) -> int:
    """Run a study and write its results, tables, figures and report into ``study.out``.

    Returns the exit status: 0, 1 if a run failed, 130 after Ctrl-C and 143 after SIGTERM. Finished
    runs are always kept.
    """
    check_folder(Path(study.out))
    backend, corpus = choose_backend(study.backend), study.corpus()
    tracker = Trackers(make_trackers(study.tracker, Path(study.out)))
    tried, untried = plan_tuning(study, corpus)
    records, missing = plan(study, corpus, () if untried else tried)
    live = LiveLine()
    new = partial(Progress, study, write=live.print, show=live.show)
    progress = new(len(records), trainings=len(jobs(missing)))
    progress.header(corpus, backend, estimated(study, [*untried, *missing]))
    if again := without_weights(study, () if untried else missing):
        print(f"{again} finished runs are run again: their weights are missing")
    status, runs = 0, _digests(tried, untried)
    try:
        if untried:
            records = []  # those on disk are not tuned
            _tune(study, tried, untried, tracker, new)
            records, missing = plan(study, corpus, tried)
            progress = new(len(records), trainings=len(jobs(missing)))
        progress.kept()
        runs += _digests(records, missing)
        for record in compute(study, missing, log=_both(progress, tracker)):
            progress.result(record)
            tracker.finish(record)
            records.append(record)
    except KeyboardInterrupt as stop:
        status = exit_status(stop)
        live.clear()
        print("\nstopped; the same command continues from here")
    finally:
        live.clear()
        tracker.close()
    summary = _summary(study, corpus, backend, records, tried if records else ())
    write_all(Path(study.out), summary, _sort(study, records), runs)
    if study.keep_weights and any(record["status"] == "ok" for record in records):
        print(f"  {weights_folder(study)}: trained weights of each run")
    failed = any(record["status"] != "ok" for record in records)
    return status or int(failed)


def _digests(records: Records, missing: Sequence[Run]) -> list[str]:
    return [record["run"] for record in records] + [run.digest() for run in missing]


def _tune(
    study: Study, tried: list[Record], untried: Sequence[Run], tracker: Tracker,
    new: Callable[..., Progress],
) -> None:  # fmt: skip
    """Carry out the runs of a sweep that are missing, and add their records."""
    total = len(tried) + len(untried)
    progress = new(len(tried), trainings=len(jobs(untried)), total=total)
    seeds = f"seed {SEED}"
    if study.sweep_seeds > 1:
        seeds = f"seeds {SEED} to {SEED + study.sweep_seeds - 1}"
    print(f"tuning: {total} runs of {seeds}, then the study with the values of the lowest loss")
    progress.kept()
    for record in compute(study, untried, log=_both(progress, tracker)):
        progress.result(record)
        tracker.finish(record)
        tried.append(record)
    print("tuned; now the study")


def _both(progress: Progress, tracker: Tracker) -> Log:
    def log(run: Run, step: int, values: Mapping[str, float]) -> None:
        progress.step(run, step, values["loss"], values)
        tracker.log(run, step, values)

    return log


def write_results(study: Study, records: Sequence[Record]) -> str:
    """Write tables, figures and the report of a study's records into ``study.out``.

    The same files as those of ``posenc compare``, for ``records = list(run_study(...))``. Files of
    an earlier study there are kept in ``earlier/``.

    Returns
    -------
    The table that the command prints.

    Raises
    ------
    RuntimeError
        No run has succeeded; the message has the first error.
    """
    errors = [record["error"] for record in records if record["status"] != "ok"]
    if len(errors) == len(records):
        raise RuntimeError(f"no run of the study has succeeded: {errors[0] if errors else 'none'}")
    backend, corpus = choose_backend(study.backend), study.corpus()
    tried, _ = plan_tuning(study, corpus)
    kept, missing = plan(study, corpus, tried)
    runs = [each["run"] for each in (*tried, *kept)] + [run.digest() for run in missing]
    summary = _summary(study, corpus, backend, records, tried)
    chosen = _sort(study, records)
    publish(Path(study.out), summary, chosen, runs, partial(_render, summary, chosen))
    return study_text(summary, chosen, width())


def _summary(
    study: Study, corpus: Corpus | None, backend: str, records: Sequence[Record],
    tried: Sequence[Record],
) -> dict[str, Any]:  # fmt: skip
    """What ``describe`` says, seconds, and what a sweep chose."""
    times = seconds([*tried, *records])
    summary = describe(study, corpus, backend, times["wall_seconds"]) | times
    if study.tunings and tried:
        summary["tuning"] = tuning_summary(study.trials(corpus, backend), tried)
    escaped: dict[str, Any] = _escape_bytes(summary)
    return escaped


def estimated(study: Study, missing: Sequence[Run]) -> float | None:
    """Seconds that the missing runs take; None where they train on no processor of this machine."""
    if study.device not in ("auto", "cpu") or study.scheduler or not missing:
        return None
    trainings = Counter(study.key(job[0].task, job[0].train_len) for job in jobs(missing))
    every = Counter(study.key(run.task, run.train_len) for run in missing)
    each = [(study.recipes[key], count, every[key]) for key, count in trainings.items()]
    return estimate(each, study.workers or min(cores(), len(jobs(missing))))


def describe(study: Study, corpus: Corpus | None, backend: str, wall: float) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat a study."""
    origin = {"posenc commit": commit()}
    return {
        "command": command(study),
        "fitted": _fitted(study),
        "config": {**asdict(study), "schemes": study.labels, "backend": backend},
        "tasks": {label: _about(study, recipe) for label, recipe in study.recipes.items()},
        "corpus": {} if corpus is None else _about_text(corpus),
        "versions": {
            "posenc": _version("posenc"),
            "posenc files": posenc_digest(backend)[:16],
            **{name: value for name, value in origin.items() if value},
            "python": platform.python_version(),
            "numpy": _version("numpy"),
            backend: _version(backend),
            "machine": f"{platform.system()} {platform.machine()}",
            "processor": processor(),
            "cores": str(cores()),
        },
        "wall_seconds": wall,
    }


def _about_text(corpus: Corpus) -> dict[str, Any]:
    unit = "bytes" if isinstance(corpus.train, bytes) else "tokens"
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        f"train_{unit}": len(corpus.train),
        f"validation_{unit}": len(corpus.validation),
        "train_files": corpus.train_files,
        "validation_files": corpus.validation_files,
    }


def _fitted(study: Study) -> dict[str, str]:
    """Options that follow from the sizes of a model; those of several tasks are not one set."""
    if len(study.recipes) > 1:
        return {}
    (recipe,) = study.recipes.values()
    return fitted_settings([n for n in study.labels if study.plans(n, recipe)], recipe)


def _about(study: Study, recipe: Recipe) -> dict[str, Any]:
    """What tables and figures say of a task."""
    task = recipe.of_task
    plans = {label: study.plans(label, recipe) for label in study.labels}
    return {
        "kind": task.kind,
        "paper": task.paper,
        "title": (task.__doc__ or "").strip().partition("\n")[0],
        "score": task.score,
        "unit": task.unit,
        "chance": task.chance,
        "groups": task.groups,
        "group_names": task.group_names(),
        "tests": tuple(task.tests()),
        "train_len": recipe.train_len,
        "eval_lens": recipe.eval_lens,
        "must_fail": {
            label: plan is not None and all(map(task.must_fail, plan.trained.schemes))
            for label, plan in plans.items()
        },
        "recipe": asdict(recipe),
    }


def write_all(out: Path, summary: dict[str, Any], records: list[Record], runs: list[str]) -> None:
    """Write all files of a study, and print its tables and the names of the files."""
    succeeded = any(record["status"] == "ok" for record in records)
    if not succeeded:
        print("every run failed" if records else "no run has finished yet")
        if holds_results(out):
            print(f"the files in {out} belong to an earlier study and are kept")
        if not records or holds_results(out):
            return

    names, earlier = publish(out, summary, records, runs, partial(_render, summary, records))
    if earlier is not None:
        print(f"the files of an earlier study are now in {earlier}")
    if succeeded:
        print(f"\n{study_text(summary, records, width())}")
    print(f"\n{summary['wall_seconds']:.0f} s; wrote")
    for name in names:
        print(f"  {out / name}")


def _render(summary: Summary, records: Sequence[Record], folder: Path) -> None:
    write_tables(folder, records)
    if any(record["status"] == "ok" for record in records):
        write_whole(folder / "table.md", study_markdown(summary, records))
        if has_text(summary):
            _write_text(folder, summary, text_records(summary, records))
        if summary.get("tuning"):
            _write_tuning(folder, summary)
        if tasks(summary):
            _write_tasks(folder, summary, records)
        write_report(summary, records, folder / "report.html")


def _write_text(folder: Path, summary: Summary, records: Records) -> None:
    write_whole(folder / "differences.csv", comparisons_csv(summary, records))
    for form in FORMATS:
        loss_against_length(records, folder / f"loss.{form}", summary, form)


def _write_tuning(folder: Path, summary: Summary) -> None:
    write_whole(folder / "tuning.csv", tuning_csv(summary))
    for form in FORMATS:
        (folder / f"tuning.{form}").write_bytes(tuning_picture(summary, form))


def _write_tasks(folder: Path, summary: Summary, records: Records) -> None:
    write_whole(folder / "tasks.csv", tasks_csv(summary, records))
    order = list(summary["config"]["schemes"])
    for label, about in tasks(summary).items():
        found = outcomes(about, records)
        for form in FORMATS:
            picture = task_picture(label, about, found, order, form)
            (folder / task_file(label, form)).write_bytes(picture)


def _sort(study: Study, records: Sequence[Record]) -> list[Record]:
    task = {label: n for n, label in enumerate(study.recipes)}
    place = {label: n for n, label in enumerate(study.labels)}

    def rank(record: Record) -> tuple[int, int, int]:
        of = task[study.key(record["task"], record["train_len"])]
        return of, place[record["scheme"]], record["seed"]

    return sorted(records, key=rank)


def _escape_bytes(value: Any) -> Any:
    """The same values, with backslash escapes for bytes of file names that are not valid UTF-8."""
    if isinstance(value, dict):
        return {key: _escape_bytes(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map(_escape_bytes, value))
    return printable(value) if isinstance(value, str) else value


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
